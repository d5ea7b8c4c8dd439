"""Do a job's parallel sizes fit its GPUs, its batches and sequences, and the model: what has to divide what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt_tools.megatron.run_state.settings import tensor_parallel_problems
from ckpt_tools.verify.readiness.facts import Facts, Rule
from ckpt_tools.verify.readiness.job import BRIDGE, VERSIONS
from ckpt_tools.verify.report import ERROR, WARNING

_BATCHES = (("global_batch_size", "micro_batch_size"), ("eval_global_batch_size", "eval_micro_batch_size"))


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


def _head_size(f: Facts) -> str | None:
    hidden, heads = f.value("hidden_size"), f.value("num_attention_heads")
    if hidden is None or heads is None or f.value("kv_channels") is not None or hidden % heads == 0:
        return None
    return f"hidden_size {hidden} is not a multiple of {heads} attention heads, and kv_channels is not given"


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


_ARGUMENTS = "training/arguments.py validate_args"
_ALL = (*VERSIONS, BRIDGE)
PARALLEL_RULES = (
    Rule("tensor-ranks", ERROR, _tensor_parallel, "every tensor-parallel rank has as many heads, rows and columns as "
         "any other", "--tensor-model-parallel-size that divides them, and convert with --tp",
         "transformer/transformer_config.py TransformerConfig.__post_init__", _ALL),
    Rule("head-size", ERROR, _head_size, "a head has as many channels as any other", "--kv-channels as stored",
         _ARGUMENTS, VERSIONS),
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
