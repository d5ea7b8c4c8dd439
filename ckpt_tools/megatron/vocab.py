"""Another padded vocabulary: rows cut off or added at the end of the embedding, the output layer and their states.

Megatron pads the vocabulary to a multiple of `make_vocab_size_divisible_by * TP`, so a job with another TP can ask
for another number of rows, and a size mismatch is fatal when it loads. Only padding may be cut off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.megatron.fsdp_dtensor.parameters import LiveParameter
from ckpt_tools.megatron.run_state.settings import count_of

_MAX_TP = 1024
VOCAB_NAMES = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True, slots=True)
class VocabChange:
    """What a resize does: `cut` names parameters that lose their rows from `kept` on, to be proven padding."""

    parameters: list[LiveParameter]
    cut: tuple[str, ...]
    kept: int
    notes: tuple[str, ...]


class Vocabulary(NamedTuple):
    """The number of stored rows, and the tensor-parallel sizes that pad the vocabulary to that number.

    Where the number of real tokens is unknown (`is_exact` False) there may be fewer such sizes.
    """

    rows: int
    multiple: int | None  # --make-vocab-size-divisible-by
    fits_tp: tuple[int, ...]
    is_exact: bool


def padded_rows(tokens: int, multiple: int, tp: int) -> int:
    """Rows that Megatron makes of a vocabulary (vocab_utils.py `calculate_padded_vocab_size`)."""
    return -(-tokens // (multiple * tp)) * multiple * tp


def told_tokens(args: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of real tokens that a run's args allow, () when they do not tell.

    `vocab_size` counts where the tokenizer brings no vocabulary and where Bridge pads it; a tokenizer with
    files may have more tokens than a stale `--vocab-size` says. Up to core 0.16 the null tokenizer adds one to it
    for the end of a document. What the run padded to shows which is right, or that none is.
    """
    size, kind = count_of(args.get("vocab_size")), str(args.get("tokenizer_type") or "")
    if size is None or not (kind.startswith(("Null", "TikTokenizer")) or args.get("should_pad_vocab")):
        return ()
    possible = (size, size + 1) if kind.startswith("Null") else (size,)
    padded, multiple, tp = (
        count_of(args.get(name))
        for name in ("padded_vocab_size", "make_vocab_size_divisible_by", "tensor_model_parallel_size")
    )
    if padded is None or multiple is None or tp is None:
        return possible
    return tuple(tokens for tokens in possible if padded_rows(tokens, multiple, tp) == padded)


def vocabulary(
    shapes: Iterable[tuple[str, Sequence[int]]], args: Mapping[str, Any], tokens: int | None
) -> Vocabulary | None:
    """The vocabulary among stored parameters, given as (live name, shape); None without one.

    `tokens` is the number of real ones where it is known better than `args` tell.
    """
    rows = next((shape[0] for name, shape in shapes if name.endswith(VOCAB_NAMES) and shape), None)
    if rows is None:
        return None
    possible = told_tokens(args) if tokens is None else (tokens,)
    multiple, heads = (
        count_of(args.get(name)) for name in ("make_vocab_size_divisible_by", "num_attention_heads")
    )
    if multiple is None:
        return Vocabulary(rows, None, (), False)
    sizes = (
        tp
        for tp in range(1, min(heads or rows // multiple, _MAX_TP) + 1)
        if (heads is None or heads % tp == 0)  # Megatron asks for it
        and rows % (multiple * tp) == 0
        and all(padded_rows(t, multiple, tp) == rows for t in possible)
    )
    return Vocabulary(rows, multiple, tuple(sizes), bool(possible))


def resize_vocab(parameters: Sequence[LiveParameter], rows: int, vocab_size: int | None) -> VocabChange:
    """The parameters with `rows` rows in every vocabulary tensor.

    `vocab_size` is the number of real tokens where it is known; then cutting is proven by it alone, and `cut` is
    empty.
    """
    sizes = {p.name: p.shape[0] for p in parameters if p.name.endswith(VOCAB_NAMES)}
    if not sizes:
        raise MappingError("--vocab-size-padded: the model has no word embedding and no output layer")
    if len(set(sizes.values())) > 1:
        raise MappingError(f"--vocab-size-padded: the vocabulary tensors have different sizes: {sizes}")
    if vocab_size is not None and rows < vocab_size:
        raise UsageError(f"--vocab-size-padded {rows} is less than the {vocab_size} tokens of the vocabulary")
    before = next(iter(sizes.values()))
    changed = [
        # vocabulary tensors are never fused
        replace(p, shape=(rows, *p.shape[1:]), rows=(p.rows[0]._replace(count=min(p.shape[0], rows)),))
        if p.name in sizes
        else p
        for p in parameters
    ]
    what = f"{before} -> {rows} rows in {', '.join(sizes)}"
    notes = (
        ()
        if rows == before
        else (f"vocabulary: {what} ({'zeros added' if rows > before else 'padding cut'})",)
    )
    cut = tuple(sizes) if rows < before and vocab_size is None else ()
    return VocabChange(changed, cut, rows, notes)
