"""What a job's own settings must be so that it can load an fsdp_dtensor checkpoint, as a table.

The format, the optimizer and the names that Megatron-FSDP asks for; what has to divide what; and what Megatron takes
no job without. What Megatron's own arguments exclude besides is its to say. Read in Megatron-LM core_v0.16.1,
core_v0.17.1, core_v0.19.0 and main d98e8a64, and in Megatron-Bridge main 067f987d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckpt_tools.megatron.run_state.settings import tensor_parallel_problems
from ckpt_tools.verify.readiness.facts import Facts, Rule, before, since
from ckpt_tools.verify.readiness.job import BRIDGE, MAIN, VERSIONS
from ckpt_tools.verify.report import ERROR, WARNING

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "micro_batch_size",
    "lr",
    "eval_interval",
)
_BATCHES = (("global_batch_size", "micro_batch_size"), ("eval_global_batch_size", "eval_micro_batch_size"))
_ARGUMENTS = "training/arguments.py validate_args"
_ADAPTER = "distributed/fsdp/mcore_fsdp_adapter.py FullyShardedDataParallelV1.__init__"
_BUFFER = "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py ParamAndGradBuffer"
_V2 = "mcore_fsdp_adapter.py FullyShardedDataParallelV2._validate_config, fully_sharded_optimizer.py"
_BRIDGE_CONFIG = "Megatron-Bridge training/config.py ConfigContainer.validate"


def _switch(*names: str) -> Callable[[Facts], str | None]:
    """Broken when any of these switches is on."""
    return lambda f: next((f"{name} is on" for name in names if f.on(name)), None)


def _required(f: Facts) -> str | None:
    missing = [name for name in _REQUIRED if f.value(name) is None]
    if f.value("hybrid_layer_pattern") is not None and "num_layers" in missing:
        missing.remove("num_layers")
    if f.value("seq_length") is None and f.value("encoder_seq_length") is None:
        missing.append("seq_length")
    missing += [] if f.on("train_iters") or f.on("train_samples") else ["train_iters or train_samples"]
    if f.value("save") is not None and not f.on("save_interval"):
        missing.append("save_interval")
    return f"not given: {', '.join(missing)}" if missing else None


def _no_positions(f: Facts) -> str | None:
    kind = "rope" if f.on("use_rotary_position_embeddings") else f.value("position_embedding_type")
    refused = f.value("add_position_embedding", True) is False and kind != "rope"
    return f"no_position_embedding with position_embedding_type {kind}" if refused else None


def _expert_ranks(f: Facts) -> str | None:
    ranks, experts = f.value("expert_model_parallel_size", 1), f.value("num_experts", 0)
    return None if ranks == 1 or (experts and experts % ranks == 0) else f"{experts} experts on {ranks} ranks"


def _ckpt_format(f: Facts) -> str | None:
    found = f.value("ckpt_format")
    return None if found == "fsdp_dtensor" else f"ckpt_format is {found}"


def _megatron_fsdp(f: Facts) -> str | None:
    return None if f.on("use_megatron_fsdp") else "use_megatron_fsdp is off"


def _pipeline(f: Facts) -> str | None:
    size = f.value("pipeline_model_parallel_size", 1)
    names = ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
    virtual = next((f.value(name) for name in names if f.value(name) is not None), None)
    if size == 1 and virtual is None:
        return None
    return f"pipeline parallel size {size}" + ("" if virtual is None else f", virtual stages {virtual}")


def _is_version_2(f: Facts) -> bool:
    return bool(f.value("megatron_fsdp_version", 1) == 2)


def _distributed_optimizer(f: Facts) -> str | None:
    return None if f.on("use_distributed_optimizer") else "use_distributed_optimizer is off"


def _strategy(f: Facts) -> str | None:
    found = f.value("data_parallel_sharding_strategy")
    return None if found in _STRATEGIES else f"data_parallel_sharding_strategy is {found!r}"


def _fusion(f: Facts) -> str | None:
    shards = f.value("data_parallel_sharding_strategy") in ("optim_grads", "optim_grads_params")
    return "gradient_accumulation_fusion is on" if f.on("gradient_accumulation_fusion") and shards else None


def _max_connections(f: Facts) -> str | None:
    found = f.job.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return "CUDA_DEVICE_MAX_CONNECTIONS is 1" if found == "1" else None


def _optimizer(f: Facts) -> str | None:
    found = f.value("optimizer")
    return None if found in ("sgd", "adam") else f"optimizer is {found}"


def _sgd(f: Facts) -> str | None:
    """Version 1 wraps it in the distributed optimizer (distrib_optimizer.py), which stops on any but Adam."""
    return None if f.value("optimizer") != "sgd" or _is_version_2(f) else "optimizer is sgd"


def _muon(f: Facts) -> str | None:
    found = f.value("optimizer", "")
    return f"optimizer is {found}" if "muon" in found else None


def _weight_shards(f: Facts) -> str | None:
    """Generalized tensor parallelism: more weight shards than ranks that compute with them."""
    sizes = {"tensor": f.tp, "expert_tensor": f.value("expert_tensor_parallel_size", f.tp)}
    for kind, ranks in sizes.items():
        shards = f.value(f"{kind}_parallel_num_weight_shards", ranks)
        if shards > ranks:
            return f"{kind}_parallel_num_weight_shards is {shards} on {ranks} ranks"
    return None


_V2_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_V2_SWITCHES = (
    "use_distributed_optimizer",
    "swiglu", "mla_down_proj_fusion",  # whose fused tensors the checkpoint code takes apart by what only v1 has
)  # fmt: skip


def _any_version_2(f: Facts) -> str | None:
    return "megatron_fsdp_version is 2" if _is_version_2(f) else None


def _version_2(f: Facts) -> str | None:
    if not _is_version_2(f):
        return None
    found = [f"{name} is {size}" for name in _V2_SIZES if (size := f.value(name, 1)) != 1]
    found += [f"{name} is on" for name in _V2_SWITCHES if f.on(name)]
    found += ["the optimizer's state is asked for"] if f.loads("optim") else []
    return ", ".join(found) or None


def _tensor_parallel(f: Facts) -> str | None:
    """A job that does not say how large the model is (Bridge's recipe) is one of the stored model."""
    problems = [
        *tensor_parallel_problems(
            f.tp, lambda name: f.value(name, f.args.get(name)), f.stored.shapes if f.tp > 1 else ()
        ),
        *_uncut(f),
    ]
    return "; ".join(problems) or None


def _uncut(f: Facts) -> Iterator[str]:
    """Sizes of the model that tensor-parallel ranks cannot share."""
    expert = f.value("expert_tensor_parallel_size", f.tp)
    sizes: tuple[tuple[str, Any, int], ...] = (
        ("ffn_hidden_size", f.value("ffn_hidden_size"), f.tp),
        ("moe_shared_expert_intermediate_size", f.value("moe_shared_expert_intermediate_size"), f.tp),
        ("moe_ffn_hidden_size", f.value("moe_ffn_hidden_size") if f.value("num_experts") else None, expert),
        ("rows of the word embeddings:", f.stored.rows, f.tp),
    )
    for name, size, ranks in sizes:
        if size is not None and size % ranks:
            axis = "expert tensor" if name.startswith("moe_ffn") else "tensor"
            yield f"{name} {size} is not a multiple of {axis} parallel size {ranks}"


def _sequence(f: Facts) -> str | None:
    length, cp = f.value("seq_length"), f.value("context_parallel_size", 1)
    if length is None:
        return None
    if cp > 1 and length % (2 * cp):
        return f"seq_length {length} is not a multiple of 2 x context parallel size {cp}"
    if f.on("sequence_parallel") and f.tp > 1 and (length // cp) % f.tp:
        return f"sequence_parallel with {length // cp} positions on {f.tp} tensor-parallel ranks"
    return None


def _expert_sequence(f: Facts) -> str | None:
    if f.tp == 1 or not f.value("num_experts") or f.on("sequence_parallel"):
        return None
    return f"experts with tensor parallel size {f.tp}, and sequence_parallel is off"


def _model_ranks(f: Facts) -> tuple[str, int]:
    pp, cp = f.value("pipeline_model_parallel_size", 1), f.value("context_parallel_size", 1)
    return f"tensor {f.tp} x pipeline {pp} x context {cp}", f.tp * pp * cp


def _world(f: Facts) -> str | None:
    """parallel_state.py `initialize_model_parallel` asks the same of experts."""
    if f.job.world is None:
        return None
    etp, ep = f.value("expert_tensor_parallel_size", f.tp), f.value("expert_model_parallel_size", 1)
    pp = f.value("pipeline_model_parallel_size", 1)
    sizes = (_model_ranks(f), (f"expert tensor {etp} x expert {ep} x pipeline {pp}", etp * ep * pp))
    found = [f"{f.job.world} GPUs are not a multiple of {what} = {size}" for what, size in sizes
             if f.job.world % size]  # fmt: skip
    return found[0] if found else None


def data_parallel(f: Facts) -> int | None:
    """Data-parallel ranks of the job; None where its GPUs are not told, or are not a multiple of the model's."""
    size = _model_ranks(f)[1]
    return None if f.job.world is None or f.job.world % size else f.job.world // size


def _batch(f: Facts) -> str | None:
    """num_microbatches_calculator.py; what a ramp-up or rounding down makes of it is not followed."""
    ranks = data_parallel(f)
    if ranks is None or f.on("decrease_batch_size_if_needed") or f.value("rampup_batch_size") is not None:
        return None
    for whole, part in _BATCHES:
        total, micro = f.value(whole), f.value(part, f.value("micro_batch_size"))
        if total is not None and micro is not None and total % (micro * ranks):
            return (
                f"{whole} {total} is not a multiple of {part} {micro} x {ranks} data-parallel ranks = "
                f"{micro * ranks}"
            )
    return None


def global_batch(f: Facts) -> int | None:
    """Samples of a step: given, else one micro-batch a rank; None where the ranks are not told."""
    ranks, micro = data_parallel(f), f.value("micro_batch_size")
    alone = None if ranks is None or micro is None else ranks * micro
    given: int | None = f.value("global_batch_size", alone)
    return given


def _batch_before(f: Facts) -> str | None:
    """A batch that is not given is one micro-batch a rank."""
    ranks, micro, before = data_parallel(f), f.value("micro_batch_size"), f.args.get("global_batch_size")
    if ranks is None or micro is None or f.value("global_batch_size") is not None:
        return None
    if type(before) is not int or before % ranks == 0:
        return None
    return (
        f"the run before had a global batch of {before}, which {ranks} data-parallel ranks cannot share: without "
        f"--global-batch-size the job takes {micro} x {ranks} = {micro * ranks}"
    )


_LM, _ALL = VERSIONS, (*VERSIONS, BRIDGE)
JOB_RULES = (
    Rule("required", ERROR, _required, "the job stops without them",
         "give them; --use-checkpoint-args takes those of the model from the checkpoint", _ARGUMENTS, _LM),
    Rule("no-position-embedding", ERROR, _no_positions, "Megatron takes this flag with rope alone",
         "drop --no-position-embedding; if the checkpoint's args have it, import the model again", _ARGUMENTS, _LM),
    Rule("expert-ranks", ERROR, _expert_ranks, "every expert-parallel rank has the same number of experts",
         "--expert-model-parallel-size that divides --num-experts", _ARGUMENTS, _LM),
    Rule("ckpt-format", ERROR, _ckpt_format, "Megatron-FSDP saves and loads in this format only",
         "--ckpt-format fsdp_dtensor", _ARGUMENTS, _ALL),
    Rule("megatron-fsdp", ERROR, _megatron_fsdp, "nothing else loads an fsdp_dtensor checkpoint",
         "--use-megatron-fsdp", _ARGUMENTS, _ALL),
    Rule("fsdp-or-fsdp2", ERROR, _switch("use_torch_fsdp2"), "PyTorch's FSDP2 and Megatron-FSDP exclude each other",
         "drop --use-torch-fsdp2", "training/models/dist_utils.py, " + _ARGUMENTS, _ALL),
    Rule("pipeline", ERROR, _pipeline, "stages number their layers locally in this format: layers would be mixed up",
         "--pipeline-model-parallel-size 1, no virtual stages",
         "training/checkpointing.py preprocess_fsdp_dtensor_state_dict", _ALL),
    Rule("distributed-optimizer", ERROR, _distributed_optimizer, "the sharded states live in the distributed "
         "optimizer; later versions switch it on by themselves", "--use-distributed-optimizer",
         "optimizer/distrib_optimizer.py", before("core-0.19")),
    Rule("sharding-strategy", ERROR, _strategy, f"known strategies are {', '.join(_STRATEGIES)}",
         "ddp.data_parallel_sharding_strategy=optim_grads_params", _BUFFER, (BRIDGE,)),
    Rule("gradient-accumulation-fusion", WARNING, _fusion, "fused weight gradients go around the sharded buffer "
         "unless Transformer Engine is 2.10 or later", "--no-gradient-accumulation-fusion", _ADAPTER, _ALL),
    Rule("max-connections", ERROR, _max_connections, "one hardware queue serialises all-gathers with compute; "
         "Megatron refuses to start", "unset CUDA_DEVICE_MAX_CONNECTIONS", _ARGUMENTS, _ALL),
    Rule("optimizer", ERROR, _muon, "Megatron-FSDP does not run it", "--optimizer adam", _ARGUMENTS,
         before("core-0.19")),
    Rule("optimizer", ERROR, _optimizer, "Megatron-FSDP runs no emerging optimizer (Muon, Lion, SOAP)",
         "--optimizer adam", _ARGUMENTS, since("core-0.19")),
    Rule("sgd", ERROR, _sgd, "the distributed optimizer that Megatron-FSDP needs takes Adam alone",
         "--optimizer adam", "core/optimizer/distrib_optimizer.py DistributedOptimizer", _ALL),
    Rule("single-grouped", ERROR, _switch("moe_single_grouped_weight", "moe_single_grouped_bias"), "one tensor of "
         "all experts does not go into Megatron-FSDP's buffers", "drop --moe-single-grouped-weight and -bias",
         _ARGUMENTS, since("core-0.19")),
    Rule("weight-shards", ERROR, _weight_shards, "generalized tensor parallelism saves torch and torch_dist only",
         "drop --tensor-parallel-num-weight-shards and --expert-tensor-parallel-num-weight-shards", _ARGUMENTS,
         since("core-0.19")),
    Rule("version-2", ERROR, _version_2, "version 2 runs without these, and loads no optimizer states",
         "--megatron-fsdp-version 1", _V2, (MAIN,)),
    Rule("version-2", ERROR, _any_version_2, "Bridge loads no checkpoint with it", "ddp.megatron_fsdp_version=1",
         _BRIDGE_CONFIG, (BRIDGE,)),
    Rule("tensor-ranks", ERROR, _tensor_parallel, "every tensor-parallel rank has as many heads, rows and columns as "
         "any other", "--tensor-model-parallel-size that divides them, and convert with --tp",
         "transformer/transformer_config.py TransformerConfig.__post_init__", _ALL),
    Rule("sequence-ranks", ERROR, _sequence, "every rank has as many positions as any other, with context "
         "parallelism in two halves", "--seq-length that divides, or fewer ranks", _ARGUMENTS, _ALL),
    Rule("expert-sequence", ERROR, _expert_sequence, "a layer of experts does not train on tensor-parallel ranks "
         "that hold the same tokens", "--sequence-parallel", "transformer/moe/moe_layer.py MoELayer.forward", _ALL),
    Rule("world-size", ERROR, _world, "every group of ranks is of one size", "--nnodes and --nproc-per-node for a "
         "multiple, or other parallel sizes", _ARGUMENTS, _ALL),
    Rule("batch-size", ERROR, _batch, "every data-parallel rank has as many micro-batches as any other",
         "--global-batch-size a multiple, a smaller --micro-batch-size, or fewer GPUs",
         "core/num_microbatches_calculator.py", _ALL),
    Rule("batch-before", WARNING, _batch_before, "another global batch trains otherwise at the same learning rate",
         "--global-batch-size as it is meant", _ARGUMENTS, _ALL),
)  # fmt: skip
