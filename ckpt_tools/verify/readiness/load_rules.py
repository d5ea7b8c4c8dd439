"""Does the checkpoint fit the job that is to load it: the rules on both, beside those on the job alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import SCHEDULE_SETTINGS, schedule_of
from ckpt_tools.megatron.names import MTP_DISK, MTP_LIVE, dialect_named
from ckpt_tools.verify.checkpoint.model_rules import MODEL_RULES
from ckpt_tools.verify.readiness.facts import Facts, Rule, before, since
from ckpt_tools.verify.readiness.job import BRIDGE, VERSIONS
from ckpt_tools.verify.readiness.job_rules import JOB_RULES, global_batch
from ckpt_tools.verify.report import ERROR, WARNING

COMPARED_ARGS = (
    "num_layers", "hidden_size", "num_attention_heads", "add_position_embedding", "gdp_num_householder"
)  # fmt: skip
WITH_VOCAB_FILE = ("max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type")
_SHOWN = 8
_TP_SIZES = (1, 2, 4, 8, 16)
STATE_KINDS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def _format(f: Facts) -> str | None:
    return None if f.kind == "fsdp_dtensor" else f"the checkpoint is of kind {f.kind}"


def _to_fsdp(f: Facts) -> str:
    if f.kind == "safetensors":
        return "import-hf CHECKPOINT CONVERTED --to fsdp_dtensor"
    return "convert CHECKPOINT CONVERTED"


def _arguments(f: Facts) -> str | None:
    return None if f.has_args else "the entry args is missing"


def _architecture(f: Facts) -> str | None:
    if f.is_warm_start:
        return None
    names = COMPARED_ARGS + (WITH_VOCAB_FILE if f.value("vocab_file") else ())
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
    """Whether the job pads its table: Megatron-LM unless told not to, Bridge when the size is its tokenizer's."""
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
    if settings.get("tokenizer_type") == "NullTokenizer" and f.job.program in before("core-0.19"):
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
    return f"nothing tells for which tensor parallel size {f.packed[0]} is arranged"


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
    job = 2 if f.value("megatron_fsdp_version", 1) == 2 else 1
    stored = 2 if f.stored.version_2 else 1
    if (
        job == stored or f.kind != "fsdp_dtensor" or (f.job.is_bridge and job == 2)
    ):  # which Bridge does not run
        return None
    return f"the names are those of Megatron-FSDP v{stored}, the job's is v{job}"


def _warm_start(f: Facts) -> str | None:
    """The versions that raise NotImplementedError do so in half precision, for optimizers that live on the GPU."""
    has_masters = f.on("bf16") or f.on("fp16")
    version_2 = f.value("megatron_fsdp_version", 1) == 2  # its load writes into the masters
    if f.loads("optim") or not has_masters or version_2 or f.on("optimizer_cpu_offload"):
        return None
    return f"{'finetune' if f.is_warm_start else 'no_load_optim'} is on"


def _schedule(f: Facts) -> str | None:
    """What the loader's own comparison finds; a job without a learning rate is not described that far."""
    settled = f.on("override_opt_param_scheduler") or f.on("use_checkpoint_opt_param_scheduler")
    if not f.loads("optim") or settled or f.value("lr") is None:
        return None
    settings = {name: f.value(name) for name in SCHEDULE_SETTINGS}
    job = schedule_of(settings | {"global_batch_size": global_batch(f)}) or {}
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
    wanted = () if optimizer == "sgd" and not f.value("sgd_momentum", 0.9) else STATE_KINDS.get(optimizer, ())
    missing = [kind for kind in wanted if kind not in f.states]
    return f"no weight has {' or '.join(missing)}, which {optimizer} asks for" if missing else None


def _rng_entries(f: Facts) -> str | None:
    if not f.loads("rng"):
        return None
    missing = list(islice((rank for rank in range(f.tp) if (0, rank) not in f.rng_ranks), _SHOWN))
    return f"no rng state for tensor parallel ranks {missing} of {f.tp}" if missing else None


def _strict(f: Facts) -> str | None:
    on = f.value("strict_fsdp_dtensor_load", True)
    return None if on else "strict_fsdp_dtensor_load is off"


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
    Rule("checkpoint-format", ERROR, _format, "Megatron-FSDP loads fsdp_dtensor checkpoints only", _to_fsdp,
         _LOADED, on_job=False),
    *JOB_RULES,
    Rule("stored-arguments", ERROR, _arguments, "Megatron-LM reads those of the run before, whatever it is told",
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
         "masters, and stops: it does not implement that", _WITH_OPTIMIZER, _RELOAD, since("core-0.19")),
    Rule("optimizer-entries", ERROR, _optimizer_entries, _EVERY_STATE, "--finetune", _LOADED, before("core-0.19")),
    Rule("optimizer-entries", ERROR, _optimizer_entries, _EVERY_STATE, _WITH_OPTIMIZER, _LOADED, since("core-0.19")),
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
    Rule("strict-load", WARNING, _strict, "missing optimizer entries are then skipped without a word",
         "drop --no-strict-fsdp-dtensor-load (Bridge: checkpoint.strict_fsdp_dtensor_load=true)", _LOADED),
)  # fmt: skip
