"""What a Megatron-FSDP job needs before it starts, as rules: each says what is wrong, why, and what to do.

Sources: Megatron-LM training/arguments.py `validate_args` and checkpointing.py, megatron-core
transformer_config.py and distributed_data_parallel_config.py, Megatron-Bridge training/config.py
`ConfigContainer.validate`, and NVIDIA's Megatron-FSDP guide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tools.verify.job import Job
from ckpt_tools.verify.report import ERROR, WARNING

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
COMPARED_ARGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
)  # checkpointing.py `check_checkpoint_args`
WITH_VOCAB_FILE = ("max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the checkpoint (None: not told by it) and of the job that is to load it."""

    kind: str
    job: Job = field(default_factory=Job)
    args: Mapping[str, Any] = field(default_factory=dict)
    has_optimizer: bool = True
    has_scheduler: bool = True
    rng_ranks: frozenset[tuple[int, int]] = frozenset()  # (pp, tp)
    vocabulary_rows: int | None = None
    has_output_layer: bool | None = None
    gated: bool | None = None  # fc1 is stored in halves
    sequential_experts: bool | None = None  # None: no experts
    local_norms: bool | None = None
    mtp_layers: int = 0

    @property
    def tp(self) -> int:
        """Tensor-parallel size of the job."""
        found = self.job.get(
            "tensor_model_parallel_size", default=self.args.get("tensor_model_parallel_size")
        )
        return int(found or 1)

    @property
    def is_warm_start(self) -> bool:
        return self.job.has("finetune")

    def loads(self, what: str) -> bool:
        """Whether the job asks for `optim` or `rng` entries."""
        wanted = self.job.get(f"load_{what}", default=True)
        return bool(wanted) and not self.job.has(f"no_load_{what}") and not self.is_warm_start


class Rule(NamedTuple):
    """`broken` gives what was found, or None. Rules with `on_job` need a job that is described."""

    name: str
    severity: str
    broken: Callable[[Facts], str | None]
    why: str
    fix: str
    on_job: bool = True
    bridge_corrects: bool = False  # Bridge changes the setting itself and goes on


def _switch(name: str, *others: str) -> Callable[[Facts], str | None]:
    """Broken when any of these switches is on."""
    return lambda f: next((f"{n} is on" for n in (name, *others) if f.job.has(n)), None)


def _format(f: Facts) -> str | None:
    return None if f.kind == "fsdp_dtensor" else f"the checkpoint is of kind {f.kind}"


def _ckpt_format(f: Facts) -> str | None:
    default = None if f.job.is_bridge else "torch_dist"
    found = f.job.get("ckpt_format", default=default)
    if f.job.has("auto_detect_ckpt_format") or found == "fsdp_dtensor":
        return None
    return f"ckpt_format is {found}"


def _megatron_fsdp(f: Facts) -> str | None:
    on = f.job.has("use_megatron_fsdp") or f.job.has("use_custom_fsdp")
    return None if on else "use_megatron_fsdp is off"


def _old_spelling(f: Facts) -> str | None:
    old = f.job.has("use_custom_fsdp") and not f.job.has("use_megatron_fsdp")
    return "use_custom_fsdp is on" if old else None


def _pipeline(f: Facts) -> str | None:
    size = f.job.get("pipeline_model_parallel_size", default=1)
    virtual = f.job.get("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
    if size == 1 and virtual is None:
        return None
    return f"pipeline parallel size {size}" + ("" if virtual is None else f", virtual stages {virtual}")


def _distributed_optimizer(f: Facts) -> str | None:
    on = f.job.get("use_distributed_optimizer", default=f.job.is_bridge or None)
    if f.job.get("megatron_fsdp_version", default=1) == 2:
        return (
            "use_distributed_optimizer is on with version 2"
            if f.job.has("use_distributed_optimizer")
            else None
        )
    return None if on else "use_distributed_optimizer is off"


def _strategy(f: Facts) -> str | None:
    found = f.job.get("data_parallel_sharding_strategy", default="no_shard")
    return None if found in STRATEGIES else f"data_parallel_sharding_strategy is {found!r}"


def _no_sharding(f: Facts) -> str | None:
    found = f.job.get("data_parallel_sharding_strategy", default="no_shard")
    return "data_parallel_sharding_strategy is no_shard" if found == "no_shard" else None


def _outer_strategy(f: Facts) -> str | None:
    outer = f.job.get("outer_dp_sharding_strategy", default="no_shard")
    inner = f.job.get("data_parallel_sharding_strategy", default="no_shard")
    if outer == "no_shard" or (outer == "optim" and inner == "optim_grads_params"):
        return None
    return f"outer_dp_sharding_strategy is {outer} with {inner}"


def _fusion(f: Facts) -> str | None:
    shards = f.job.get("data_parallel_sharding_strategy") in ("optim_grads", "optim_grads_params")
    on = f.job.get("gradient_accumulation_fusion", default=True)
    return "gradient_accumulation_fusion is on" if on and shards else None


def _max_connections(f: Facts) -> str | None:
    found = f.job.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return "CUDA_DEVICE_MAX_CONNECTIONS is 1" if found == "1" else None


def _cpu_offloading(f: Facts) -> str | None:
    if not f.job.has("cpu_offloading"):
        return None
    others = {
        "pipeline parallelism": f.job.get("pipeline_model_parallel_size", default=1) > 1,
        "recompute_granularity": f.job.get("recompute_granularity") is not None,
        "fine_grained_activation_offloading": f.job.has("fine_grained_activation_offloading"),
    }
    found = [name for name, on in others.items() if on]
    return f"cpu_offloading with {' and '.join(found)}" if found else None


def _offloaded_layers(f: Facts) -> str | None:
    count = f.job.get("cpu_offloading_num_layers", default=0)
    total = f.job.get("num_layers", default=f.args.get("num_layers"))
    if not f.job.has("cpu_offloading") or total is None or 0 <= count < total:
        return None
    return f"cpu_offloading_num_layers is {count} of {total} layers"


def _user_buffers(f: Facts) -> str | None:
    segments = f.job.environment.get("PYTORCH_CUDA_ALLOC_CONF", "").split(",")
    clash = _registers_buffers(f) and "expandable_segments:True" in segments
    return "nccl_ub with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if clash else None


def _registers_buffers(f: Facts) -> bool:
    return f.job.has("nccl_ub") or f.job.has("use_nccl_ub")  # Bridge's name, Megatron-LM's flag


def _manual_registration(f: Facts) -> str | None:
    alone = f.job.has("fsdp_manual_registration") and not _registers_buffers(f)
    return "fsdp_manual_registration without nccl_ub" if alone else None


def _meta_device(f: Facts) -> str | None:
    alone = f.job.has("init_model_with_meta_device") and _megatron_fsdp(f) is not None
    return "init_model_with_meta_device without use_megatron_fsdp" if alone else None


def _weight_hash(f: Facts) -> str | None:
    every = f.job.get("check_weight_hash_across_dp_replicas_interval")
    shards = f.job.get("data_parallel_sharding_strategy") == "optim_grads_params"
    return (
        f"check_weight_hash_across_dp_replicas_interval is {every}" if every is not None and shards else None
    )


def _version_2(f: Facts) -> str | None:
    if f.job.get("megatron_fsdp_version", default=1) != 2:
        return None
    sizes = {n: f.job.get(n, default=1) for n in ("tensor_model_parallel_size", "context_parallel_size")}
    found = [f"{name} is {size}" for name, size in sizes.items() if size != 1]
    found += ["fp8 is on"] if f.job.get("fp8", "fp8_format") else []
    found += ["the optimizer's state is asked for"] if f.loads("optim") else []
    return ", ".join(found) or None


def _architecture(f: Facts) -> str | None:
    if f.is_warm_start:
        return None
    names = COMPARED_ARGS + (WITH_VOCAB_FILE if f.job.get("vocab_file") else ())
    pairs = {name: (f.job.get(name), f.args.get(name)) for name in names}
    found = [f"{n}: job {job}, checkpoint {saved}" for n, (job, saved) in pairs.items()
             if job is not None and saved is not None and job != saved]  # fmt: skip
    return "; ".join(found) or None


def _optimizer_entries(f: Facts) -> str | None:
    return "the checkpoint has no optimizer state" if not f.has_optimizer and f.loads("optim") else None


def _rng_entries(f: Facts) -> str | None:
    if not f.loads("rng"):
        return None
    missing = [rank for rank in range(f.tp) if (0, rank) not in f.rng_ranks]
    if not missing:
        return None
    return f"no rng state for tensor parallel ranks {missing} of {f.tp}"


def _strict(f: Facts) -> str | None:
    return (
        "strict_fsdp_dtensor_load is off"
        if f.job.get("strict_fsdp_dtensor_load", default=True) is False
        else None
    )


def _padded(size: int, f: Facts) -> int:
    """Rows of the table for `size` tokens (Megatron-LM tokenizer.py `vocab_size_with_padding`)."""
    names = ("pad_vocab_size", "should_pad_vocab")
    saved = next((f.args[name] for name in names if name in f.args), True)
    if not f.job.get(*names, default=saved):
        return size
    divisor = f.job.get(
        "make_vocab_size_divisible_by", default=f.args.get("make_vocab_size_divisible_by", 128)
    )
    multiple = int(divisor) * f.tp
    return -(-size // multiple) * multiple


def _vocabulary(f: Facts) -> str | None:
    rows, wanted = f.vocabulary_rows, f.job.get("padded_vocab_size")
    size = f.job.get("vocab_size", default=f.args.get("vocab_size"))
    if wanted is None and isinstance(size, int):
        wanted = _padded(size, f)
    if rows is None or wanted is None or rows == wanted:
        return None
    return f"the word embeddings have {rows} rows, the job will ask for {wanted}"


def _tied(f: Facts) -> str | None:
    untied = f.job.settings.get("untie_embeddings_and_output_weights")
    if f.job.settings.get("share_embeddings_and_output_weights") is not None:
        untied = not f.job.settings["share_embeddings_and_output_weights"]
    if untied is None or f.has_output_layer is None or bool(untied) == f.has_output_layer:
        return None
    job, stored = (
        "an output layer of its own" if untied else "a tied one",
        "has" if f.has_output_layer else "has no",
    )
    return f"the job has {job}, the checkpoint {stored} output_layer.weight"


def _swiglu(f: Facts) -> str | None:
    wanted = f.job.settings.get("swiglu")
    if wanted is None or f.gated is None or bool(wanted) == f.gated:
        return None
    return f"swiglu is {'on' if wanted else 'off'}, fc1 is stored {'in halves' if f.gated else 'whole'}"


def _experts(f: Facts) -> str | None:
    grouped = f.job.settings.get("moe_grouped_gemm")
    if grouped is None or f.sequential_experts is None or bool(grouped) != f.sequential_experts:
        return None
    return f"moe_grouped_gemm is {'on' if grouped else 'off'}, experts are stored as " + (
        "local_experts.N" if f.sequential_experts else "one grouped module"
    )


def _layer_spec(f: Facts) -> str | None:
    wanted = f.job.get("transformer_impl")
    if wanted not in ("local", "transformer_engine") or f.local_norms is None:
        return None
    return (
        None
        if (wanted == "local") == f.local_norms
        else f"transformer_impl is {wanted}, norms are named otherwise"
    )


def _mtp(f: Facts) -> str | None:
    wanted = f.job.get("mtp_num_layers")
    return (
        None
        if wanted is None or wanted == f.mtp_layers
        else f"mtp_num_layers is {wanted}, {f.mtp_layers} stored"
    )


_CONVERT = "convert with --layer-spec, --experts or --swiglu as the job has it, or change the job"
RULES = (
    Rule("checkpoint-format", ERROR, _format, "Megatron-FSDP loads fsdp_dtensor checkpoints only",
         "convert-torch-dist-to-fsdp-dtensor CHECKPOINT CONVERTED", on_job=False),
    Rule("ckpt-format", ERROR, _ckpt_format, "Megatron-FSDP saves and loads in this format only",
         "--ckpt-format fsdp_dtensor"),
    Rule("megatron-fsdp", ERROR, _megatron_fsdp, "without it the job runs another kind of data parallelism",
         "--use-megatron-fsdp"),
    Rule("old-spelling", WARNING, _old_spelling, "deprecated; later releases do not know it", "--use-megatron-fsdp"),
    Rule("fsdp-or-fsdp2", ERROR, _switch("use_torch_fsdp2"), "PyTorch's FSDP2 and Megatron-FSDP exclude each other",
         "drop --use-torch-fsdp2"),
    Rule("pipeline", ERROR, _pipeline, "stages number their layers locally in this format: layers would be mixed up",
         "--pipeline-model-parallel-size 1, no virtual stages"),
    Rule("distributed-optimizer", ERROR, _distributed_optimizer,
         "version 1 keeps its sharded states in the distributed optimizer, version 2 forbids it",
         "--use-distributed-optimizer (version 2: drop it)"),
    Rule("sharding-strategy", ERROR, _strategy, f"known strategies are {', '.join(STRATEGIES)}",
         "--data-parallel-sharding-strategy optim_grads_params"),
    Rule("no-sharding", WARNING, _no_sharding, "every rank then holds the whole model",
         "--data-parallel-sharding-strategy optim_grads_params"),
    Rule("outer-strategy", ERROR, _outer_strategy, "hybrid sharding knows the outer strategy optim, with "
         "optim_grads_params inside, only", "--outer-dp-sharding-strategy no_shard"),
    Rule("tp-pp-dp-mapping", ERROR, _switch("use_tp_pp_dp_mapping"), "Megatron-FSDP's mesh needs the order of ranks "
         "tp-cp-ep-dp-pp", "drop --use-tp-pp-dp-mapping"),
    Rule("average-in-collective", ERROR, _switch("ddp_average_in_collective", "average_in_collective"),
         "Megatron-FSDP scales gradients itself", "drop --ddp-average-in-collective", bridge_corrects=True),
    Rule("gradient-accumulation-fusion", WARNING, _fusion, "fused weight gradients go around the sharded buffer "
         "unless Transformer Engine knows Megatron-FSDP", "--no-gradient-accumulation-fusion"),
    Rule("max-connections", ERROR, _max_connections, "one hardware queue serialises all-gathers with compute; "
         "Megatron refuses to start", "unset CUDA_DEVICE_MAX_CONNECTIONS"),
    Rule("mxfp8-buffer", ERROR, _switch("reuse_grad_buf_for_mxfp8_param_ag"), "Megatron-FSDP has no such "
         "gradient buffer to reuse", "drop --reuse-grad-buf-for-mxfp8-param-ag", bridge_corrects=True),
    Rule("cpu-offloading", ERROR, _cpu_offloading, "activation offloading excludes these", "drop --cpu-offloading"),
    Rule("offloaded-layers", ERROR, _offloaded_layers, "at least one layer has to stay on the device",
         "--cpu-offloading-num-layers below the number of layers"),
    Rule("user-buffers", ERROR, _user_buffers, "NCCL user buffers need memory pools, which expandable segments break",
         "unset PYTORCH_CUDA_ALLOC_CONF, or drop --nccl-ub"),
    Rule("manual-registration", WARNING, _manual_registration, "it registers NCCL user buffers", "--use-nccl-ub"),
    Rule("meta-device", ERROR, _meta_device, "only Megatron-FSDP materialises such a model", "--use-megatron-fsdp"),
    Rule("weight-hash", ERROR, _weight_hash, "no rank has whole weights to compare", "drop the interval"),
    Rule("version-2", ERROR, _version_2, "version 2 runs with TP = CP = 1, without FP8; it loads no optimizer states",
         "--megatron-fsdp-version 1"),
    Rule("architecture", ERROR, _architecture, "the loader compares these with the stored args and stops",
         "use the checkpoint's values, or --finetune"),
    Rule("vocabulary", ERROR, _vocabulary, "a size mismatch is fatal; the table is padded to a multiple of "
         "make_vocab_size_divisible_by times the tensor parallel size",
         "set --make-vocab-size-divisible-by or --tensor-model-parallel-size as its writer did, or pad again"),
    Rule("tied-embeddings", ERROR, _tied, "the key sets differ, which a strict load refuses",
         "--untie-embeddings-and-output-weights as in the run that wrote the weights"),
    Rule("swiglu", ERROR, _swiglu, "weight_w and weight_v are asked for exactly when --swiglu is given", _CONVERT),
    Rule("experts", ERROR, _experts, "expert names follow --moe-grouped-gemm", _CONVERT),
    Rule("layer-spec", ERROR, _layer_spec, "norm names follow --transformer-impl", _CONVERT),
    Rule("mtp", ERROR, _mtp, "the key sets differ, which a strict load refuses", "--mtp-num-layers as stored"),
    Rule("optimizer-entries", ERROR, _optimizer_entries, "a strict load asks for every state",
         "--finetune, or --no-load-optim --no-load-rng"),
    Rule("rng-entries", ERROR, _rng_entries, "a strict load asks for the rng state of every tensor parallel rank",
         "--no-load-rng, or convert with --tp"),
    Rule("strict-load", WARNING, _strict, "missing optimizer entries are then skipped without a word",
         "drop --no-strict-fsdp-dtensor-load"),
)  # fmt: skip
