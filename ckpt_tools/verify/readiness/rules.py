"""Can the job load the checkpoint: rules on the job's own settings, and on both, as a table.

The format, the optimizer and the names that Megatron-FSDP asks for; what has to divide what; and what Megatron takes
no job without. What Megatron's own arguments exclude besides is its to say. Read in Megatron-LM core_v0.16.1,
core_v0.17.1, core_v0.19.0 and main d98e8a64, and in Megatron-Bridge main 067f987d.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import SCHEDULE_SETTINGS, schedule_of
from ckpt_tools.megatron.names import MTP_DISK, MTP_LIVE, dialect_named
from ckpt_tools.megatron.run_state.settings import tensor_parallel_problems
from ckpt_tools.verify.readiness.facts import Facts, Rule, before, since
from ckpt_tools.verify.readiness.job import BRIDGE, MAIN, VERSIONS
from ckpt_tools.verify.readiness.model_rules import MODEL_RULES
from ckpt_tools.verify.report import ERROR, WARNING

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "micro_batch_size", "lr",
             "eval_interval")  # fmt: skip
_BATCHES = (("global_batch_size", "micro_batch_size"), ("eval_global_batch_size", "eval_micro_batch_size"))
_ARGUMENTS = "training/arguments.py validate_args"
_ADAPTER = "distributed/fsdp/mcore_fsdp_adapter.py FullyShardedDataParallelV1.__init__"
_BUFFER = "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py ParamAndGradBuffer"
_V2 = "mcore_fsdp_adapter.py FullyShardedDataParallelV2._validate_config, fully_sharded_optimizer.py"
_BRIDGE_CONFIG = "Megatron-Bridge training/config.py ConfigContainer.validate"


def _switch(*names: str) -> Callable[[Facts], str | None]:
    """Broken when any of these switches is on."""
    return lambda f: next((f"{name} is on" for name in names if f.on(name)), None)


def _off(name: str, default: bool = False) -> Callable[[Facts], str | None]:
    """Broken when this switch is off."""
    return lambda f: None if f.value(name, default) else f"{name} is off"


def _other_than(name: str, *known: str) -> Callable[[Facts], str | None]:
    """Broken unless a setting is one of these."""
    return lambda f: None if f.value(name) in known else f"{name} is {f.value(name)}"


def _required(f: Facts) -> str | None:
    missing = [name for name in _REQUIRED if f.value(name) is None]
    if f.value("hybrid_layer_pattern") is not None and "num_layers" in missing:
        missing.remove("num_layers")
    if f.value("seq_length") is None and f.value("encoder_seq_length") is None:
        missing.append("seq_length")
    missing += [] if f.on("train_iters") or f.on("train_samples") else ["train_iters or train_samples"]
    interval = f.value("eval_interval")
    missing += ["an eval_interval above 0"] if isinstance(interval, int) and interval < 1 else []
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


def _pipeline(f: Facts) -> str | None:
    size = f.value("pipeline_model_parallel_size", 1)
    names = ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
    virtual = next((f.value(name) for name in names if f.value(name) is not None), None)
    if size == 1 and virtual is None:
        return None
    return f"pipeline parallel size {size}" + ("" if virtual is None else f", virtual stages {virtual}")


def _is_version_2(f: Facts) -> bool:
    return bool(f.value("megatron_fsdp_version", 1) == 2)


def _strategy(f: Facts) -> str | None:
    found = f.value("data_parallel_sharding_strategy")
    return None if found in _STRATEGIES else f"data_parallel_sharding_strategy is {found!r}"


def _fusion(f: Facts) -> str | None:
    shards = f.value("data_parallel_sharding_strategy") in ("optim_grads", "optim_grads_params")
    return "gradient_accumulation_fusion is on" if f.on("gradient_accumulation_fusion") and shards else None


def _max_connections(f: Facts) -> str | None:
    found = f.job.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return "CUDA_DEVICE_MAX_CONNECTIONS is 1" if found == "1" else None


def _muon(f: Facts) -> str | None:
    found = f.value("optimizer", "")
    return f"optimizer is {found}" if "muon" in found else None


def _sgd(f: Facts) -> str | None:
    """Version 1 wraps it in the distributed optimizer (distrib_optimizer.py), which stops on any but Adam."""
    return None if f.value("optimizer") != "sgd" or _is_version_2(f) else "optimizer is sgd"


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
    "swiglu", "mla_down_proj_fusion",  # the checkpoint code splits their fused tensors with attributes of v1 only
)  # fmt: skip


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
    """Data-parallel ranks of the job; None if its GPUs are unknown, or are not a multiple of the model's."""
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
    """Samples of a step: given, else one micro-batch a rank; None if the ranks are unknown."""
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
    Rule("ckpt-format", ERROR, _other_than("ckpt_format", "fsdp_dtensor"),
         "Megatron-FSDP saves and loads in this format only", "--ckpt-format fsdp_dtensor", _ARGUMENTS, _ALL),
    Rule("megatron-fsdp", ERROR, _off("use_megatron_fsdp"), "nothing else loads an fsdp_dtensor checkpoint",
         "--use-megatron-fsdp", _ARGUMENTS, _ALL),
    Rule("fsdp-or-fsdp2", ERROR, _switch("use_torch_fsdp2"), "PyTorch's FSDP2 and Megatron-FSDP exclude each other",
         "drop --use-torch-fsdp2", "training/models/dist_utils.py, " + _ARGUMENTS, _ALL),
    Rule("pipeline", ERROR, _pipeline, "stages number their layers locally in this format: layers would be mixed up",
         "--pipeline-model-parallel-size 1, no virtual stages",
         "training/checkpointing.py preprocess_fsdp_dtensor_state_dict", _ALL),
    Rule("distributed-optimizer", ERROR, _off("use_distributed_optimizer"), "the sharded states live in the "
         "distributed optimizer; later versions switch it on by themselves", "--use-distributed-optimizer",
         "optimizer/distrib_optimizer.py", before("core-0.18")),
    Rule("sharding-strategy", ERROR, _strategy, f"known strategies are {', '.join(_STRATEGIES)}",
         "ddp.data_parallel_sharding_strategy=optim_grads_params", _BUFFER, (BRIDGE,)),
    Rule("gradient-accumulation-fusion", WARNING, _fusion, "fused weight gradients go around the sharded buffer "
         "unless Transformer Engine is 2.10 or later", "--no-gradient-accumulation-fusion", _ADAPTER, _ALL),
    Rule("max-connections", ERROR, _max_connections, "one hardware queue serialises all-gathers with compute; "
         "Megatron refuses to start", "unset CUDA_DEVICE_MAX_CONNECTIONS", _ARGUMENTS, _ALL),
    Rule("optimizer", ERROR, _muon, "Megatron-FSDP does not run it", "--optimizer adam", _ARGUMENTS,
         before("core-0.18")),
    Rule("optimizer", ERROR, _other_than("optimizer", "sgd", "adam"),
         "Megatron-FSDP runs no emerging optimizer (Muon, Lion, SOAP)", "--optimizer adam", _ARGUMENTS,
         since("core-0.18")),
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
    Rule("version-2", ERROR, lambda f: "megatron_fsdp_version is 2" if _is_version_2(f) else None,
         "Bridge loads no checkpoint with it", "ddp.megatron_fsdp_version=1", _BRIDGE_CONFIG, (BRIDGE,)),
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
         "--global-batch-size as intended", _ARGUMENTS, _ALL),
)  # fmt: skip


_COMPARED_ARGS = (
    "num_layers", "hidden_size", "num_attention_heads", "add_position_embedding", "gdp_num_householder"
)  # fmt: skip
_WITH_VOCAB_FILE = ("max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type")
_SHOWN = 8
_TP_SIZES = (1, 2, 4, 8, 16)
_STATE_KINDS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def _architecture(f: Facts) -> str | None:
    if f.on("finetune"):
        return None
    names = _COMPARED_ARGS + (_WITH_VOCAB_FILE if f.value("vocab_file") else ())
    pairs = {name: (f.value(name), f.args.get(name)) for name in names}
    found = [f"{n}: job {job}, checkpoint {saved}" for n, (job, saved) in pairs.items()
             if job is not None and saved is not None and job != saved]  # fmt: skip
    return "; ".join(found) or None


def _multiple(f: Facts, settings: Mapping[str, Any], tp: int | None = None) -> int:
    given = (source.get("make_vocab_size_divisible_by") for source in (settings, f.args))
    return next((divisor for divisor in given if isinstance(divisor, int) and divisor > 0), 128) * (
        tp or f.tp
    )


def _pads(f: Facts, settings: Mapping[str, Any]) -> bool:
    """Whether the job pads its table: Megatron-LM unless switched off, Bridge when the size is its tokenizer's."""
    name = "should_pad_vocab" if f.job.is_bridge else "pad_vocab_size"
    silent = not f.job.is_bridge or settings.get("vocab_size") is None
    return settings.get(name, f.args.get(name, silent)) is not False


def wanted_rows(f: Facts, settings: Mapping[str, Any], tp: int | None = None) -> int | None:
    """Rows of the word embeddings under `settings`, None when only the tokenizer knows (build_tokenizer.py).

    `tp` is another tensor-parallel size than the job's.
    """
    if isinstance(padded := settings.get("padded_vocab_size"), int) and settings is not f.args:
        return padded
    size = next(
        (s for s in (settings.get("vocab_size"), f.tokens, f.args.get("vocab_size")) if s is not None), None
    )
    if not isinstance(size, int):
        return None
    if settings.get("tokenizer_type") == "NullTokenizer" and f.job.program in before("core-0.18"):
        size += 1  # its end of document
    multiple = _multiple(f, settings, tp)
    return -(-size // multiple) * multiple if _pads(f, settings) else size


def _vocabulary(f: Facts) -> str | None:
    settings = f.job.settings
    rows, wanted = f.stored.rows, wanted_rows(f, settings)
    if rows is None or rows == wanted:
        return None
    if wanted is not None:
        fits = [str(tp) for tp in _TP_SIZES if wanted_rows(f, settings, tp) == rows]
        other = f" (tensor parallel size {' or '.join(fits)} would fit)" if fits else ""
        return f"the word embeddings have {rows} rows, the job will ask for {wanted}{other}"
    multiple = _multiple(f, settings)
    if rows % multiple == 0 or not _pads(f, settings):
        return None
    return f"the word embeddings have {rows} rows, the job pads to a multiple of {multiple}"


def _packed(f: Facts) -> str | None:
    if not f.packed or f.tp_of_packed in (None, f.tp):
        return None
    what = f"{len(f.packed)} packed projections ({f.packed[0]}, ...)"
    return f"{what} are arranged for tensor parallel size {f.tp_of_packed}, the job's is {f.tp}"


def _packed_unknown(f: Facts) -> str | None:
    if not f.packed or f.tp_of_packed is not None:
        return None
    return f"the tensor parallel size of the row order of {f.packed[0]} is not recorded"


def _dialect(f: Facts) -> str | None:
    """Names that the job's program will ask for under another spelling."""
    dialect = dialect_named(f.job.program)
    names = f.stored.shapes
    spelled = {
        inner for inner in (MTP_DISK, MTP_LIVE) if any(".mtp." in f".{n}" and inner in n for n in names)
    }
    if spelled and dialect.mtp_in_state not in spelled:
        return (
            f"multi-token prediction is stored as {', '.join(spelled)}, asked for as {dialect.mtp_in_state}"
        )
    convolutions = {m[1] for m in map(re.compile(r"mixer\.(conv1d[._])").search, names) if m}
    if convolutions and dialect.mamba_conv not in convolutions:
        return (
            f"Mamba's convolution is stored as {', '.join(convolutions)}, asked for as {dialect.mamba_conv}"
        )
    apart = any(name.endswith(".self_attention.in_proj.weight.query") for name in names)
    fused = any(name.endswith(".self_attention.in_proj.weight") for name in names)
    if (apart or fused) and not (fused if dialect.gdn_fused_in_state else apart):
        return "the gated delta net's projections are stored " + ("apart" if apart else "fused")
    return None


def _fsdp_version(f: Facts) -> str | None:
    """Whether names are those of the other version of Megatron-FSDP, which has another number of wrappers."""
    job = 2 if _is_version_2(f) else 1
    stored = 2 if f.stored.version_2 else 1
    if job == stored or f.kind != "fsdp_dtensor" or (f.job.is_bridge and job == 2):  # Bridge does not run it
        return None
    return f"the names are those of Megatron-FSDP v{stored}, the job's is v{job}"


def _warm_start(f: Facts) -> str | None:
    """The versions that raise NotImplementedError do so in half precision, for optimizers that live on the GPU.

    A load of version 2 writes into the masters.
    """
    has_masters = f.on("bf16") or f.on("fp16")
    if f.loads("optim") or not has_masters or _is_version_2(f) or f.on("optimizer_cpu_offload"):
        return None
    return f"{'finetune' if f.on('finetune') else 'no_load_optim'} is on"


def _schedule(f: Facts) -> str | None:
    """What the loader's own comparison finds; a job without a learning rate is not described that far."""
    settled = f.on("override_opt_param_scheduler") or f.on("use_checkpoint_opt_param_scheduler")
    if not f.loads("optim") or settled or f.value("lr") is None:
        return None
    settings = {name: f.value(name) for name in SCHEDULE_SETTINGS}
    batch = global_batch(f)
    job = schedule_of(settings | {"global_batch_size": batch or 1}) or {}
    if batch is None and settings["train_iters"]:  # steps are samples
        job = {name: value for name, value in job.items() if not name.endswith("_steps")}
    job |= {"max_lr": f.value("lr"), "min_lr": f.value("min_lr", 0.0)}
    pairs = {name: (found, f.schedule.get(name)) for name, found in job.items()}
    found = [f"{n}: job {a}, checkpoint {b}" for n, (a, b) in pairs.items() if b is not None and a != b]
    return "; ".join(found) or None


def _fresh_samples(f: Facts) -> str | None:
    samples = f.value("train_samples")
    return f"train_samples is {samples}" if f.begins and f.loads("optim") and samples is not None else None


def _optimizer_entries(f: Facts) -> str | None:
    return "the checkpoint has no optimizer state" if not f.states and f.loads("optim") else None


def _state_kinds(f: Facts) -> str | None:
    if not f.states or not f.loads("optim"):
        return None
    optimizer = str(f.value("optimizer"))
    wanted = (
        () if optimizer == "sgd" and not f.value("sgd_momentum", 0.9) else _STATE_KINDS.get(optimizer, ())
    )
    missing = [kind for kind in wanted if kind not in f.states]
    return f"no weight has {' or '.join(missing)}, which {optimizer} asks for" if missing else None


def _rng_entries(f: Facts) -> str | None:
    if not f.loads("rng"):
        return None
    missing = list(islice((rank for rank in range(f.tp) if (0, rank) not in f.rng_ranks), _SHOWN))
    return f"no rng state for tensor parallel ranks {missing} of {f.tp}" if missing else None


_LOADED = "training/checkpointing.py _load_base_checkpoint"
_RELOAD = "optimizer/distrib_optimizer.py _copy_model_params_to_main_params"
_WITH_OPTIMIZER = (
    "give it a fresh optimizer: `strip CHECKPOINT OUT --fresh-optimizer` (or convert --weights-only, "
    "import-hf); from weights alone start core-0.16 or core-0.17 (--finetune) and continue from what they save"
)
_EVERY_STATE = "a strict load asks for every state"
_PAD_AGAIN = (
    "set --make-vocab-size-divisible-by or --tensor-model-parallel-size as its writer did, or convert with "
    "--vocab-size-padded"
)
RULES = (
    Rule("checkpoint-format", ERROR,
         lambda f: None if f.kind == "fsdp_dtensor" else f"the checkpoint is of kind {f.kind}",
         "Megatron-FSDP loads fsdp_dtensor checkpoints only",
         lambda f: "import-hf CHECKPOINT CONVERTED --to fsdp_dtensor --lr LR --min-lr MIN_LR --weight-decay WD"
         if f.kind == "safetensors" else "convert CHECKPOINT CONVERTED", _LOADED, on_job=False),
    *JOB_RULES,
    Rule("stored-arguments", ERROR, lambda f: None if f.has_args else "the entry args is missing",
         "Megatron-LM reads those of the run before, whatever its flags say",
         "run Megatron-Bridge (--target bridge), or convert a checkpoint of Megatron-LM", _LOADED, VERSIONS),
    Rule("architecture", ERROR, _architecture, "the loader compares these with the stored args and stops",
         "use the checkpoint's values, or --finetune", "training/checkpointing.py check_checkpoint_args"),
    Rule("vocabulary", ERROR, _vocabulary, "a size mismatch is fatal; the table is padded to a multiple of "
         "make_vocab_size_divisible_by times the tensor parallel size", _PAD_AGAIN,
         "tokenizers/utils/build_tokenizer.py vocab_size_with_padding"),
    Rule("packed-projections", ERROR, _packed, "rows are grouped by rank: the job would load and compute wrong "
         "numbers", "--tensor-model-parallel-size of the checkpoint, or convert with --tp",
         "ssm/gated_delta_net.py, ssm/mamba_mixer.py"),
    Rule("packed-projections-unknown", WARNING, _packed_unknown, "rows are grouped by rank: with another size the "
         "job would load and compute wrong numbers", "convert with --tp, which records the size",
         "ssm/gated_delta_net.py, ssm/mamba_mixer.py"),
    Rule("names", ERROR, _dialect, "versions spell these keys in different ways, and a strict load asks for its own",
         "convert with --target as the job",
         "training/checkpointing.py preprocess_fsdp_dtensor_state_dict"),
    Rule("fsdp-version", ERROR, _fsdp_version, "versions 1 and 2 wrap the model differently, and ask for names with "
         "wrappers of their own", "--megatron-fsdp-version as the names are, or convert with --layout mfsdp-v1 or "
         "mfsdp-v2", "distributed/fsdp/mcore_fsdp_adapter.py FullyShardedDataParallelV2"),
    *MODEL_RULES,
    Rule("warm-start", ERROR, _warm_start, "after a load without optimizer Megatron-FSDP is to copy weights to "
         "masters, and stops: it does not implement that", _WITH_OPTIMIZER, _RELOAD, since("core-0.18")),
    Rule("optimizer-entries", ERROR, _optimizer_entries, _EVERY_STATE, "--finetune", _LOADED, before("core-0.18")),
    Rule("optimizer-entries", ERROR, _optimizer_entries, _EVERY_STATE, _WITH_OPTIMIZER, _LOADED, since("core-0.18")),
    Rule("optimizer-entries", ERROR, _optimizer_entries, "the optimizer would not have what it asks for",
         "checkpoint.load_optim=false, or checkpoint.finetune=true",
         "Megatron-Bridge training/checkpointing.py load_checkpoint", (BRIDGE,)),
    Rule("schedule", ERROR, _schedule, "the loader compares its learning-rate schedule with the stored one and stops",
         "--override-opt_param-scheduler for the job's, --use-checkpoint-opt_param-scheduler for the stored one",
         "optimizer_param_scheduler.py load_state_dict", VERSIONS),
    Rule("fresh-samples", ERROR, _fresh_samples, "a job that has consumed no samples at iteration 1 or later counts "
         "in iterations, and stops if it has to count in samples", "--train-iters",
         "training/training.py build_train_valid_test_data_loaders", VERSIONS),
    Rule("state-kinds", ERROR, _state_kinds, "a strict load asks for every kind of state of the job's optimizer",
         "--optimizer as in the run that wrote the states", "optimizer/distrib_optimizer.py "
         "sharded_param_state_fsdp_dtensor"),
    Rule("rng-entries", ERROR, _rng_entries, "a strict load asks for the rng state of every tensor parallel rank",
         "--no-load-rng, or convert with --tp", _LOADED, VERSIONS),
    Rule("strict-load", WARNING, _off("strict_fsdp_dtensor_load", default=True),
         "missing optimizer entries are then skipped without a word",
         "drop --no-strict-fsdp-dtensor-load (Bridge: checkpoint.strict_fsdp_dtensor_load=true)", _LOADED),
)  # fmt: skip
