"""Another padded vocabulary: rows cut off or added at the end of the embedding, the output layer and their states.

Megatron pads the vocabulary to a multiple of `make_vocab_size_divisible_by * TP`, so a job with another TP can ask
for another number of rows, and a size mismatch is fatal when it loads. Only padding may be cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.megatron.live import LiveParameter

VOCAB_NAMES = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True, slots=True)
class VocabChange:
    """What a resize does: `cut` names parameters whose rows from `kept` on are left out, to be proven padding."""

    parameters: list[LiveParameter]
    cut: tuple[str, ...]
    kept: int
    notes: tuple[str, ...]


def is_vocab(name: str) -> bool:
    """Whether a live name is a tensor whose rows are tokens."""
    return name.endswith(VOCAB_NAMES)


def resize_vocab(parameters: Sequence[LiveParameter], rows: int, vocab_size: int | None) -> VocabChange:
    """The parameters with `rows` rows in every vocabulary tensor.

    `vocab_size` is the number of real tokens where it is known; then cutting is proven by it alone, and `cut` is
    empty.

    Raises:
        UsageError: fewer rows than real tokens.
        MappingError: the model has no vocabulary tensor, or several of different sizes.
    """
    found = {p.name: p.shape[0] for p in parameters if is_vocab(p.name)}
    if not found:
        raise MappingError("--vocab-size-padded: the model has no word embedding and no output layer")
    if len(set(found.values())) > 1:
        raise MappingError(f"--vocab-size-padded: the vocabulary tensors have different sizes: {found}")
    if vocab_size is not None and rows < vocab_size:
        raise UsageError(f"--vocab-size-padded {rows} is less than the {vocab_size} tokens of the vocabulary")
    before = next(iter(found.values()))
    changed = [_with_rows(p, rows) if p.name in found else p for p in parameters]
    what = f"{before} -> {rows} rows in {', '.join(found)}"
    notes = (
        ()
        if rows == before
        else (f"vocabulary: {what} ({'zeros added' if rows > before else 'padding cut'})",)
    )
    cut = tuple(found) if rows < before and vocab_size is None else ()
    return VocabChange(changed, cut, rows, notes)


def _with_rows(parameter: LiveParameter, rows: int) -> LiveParameter:
    (whole,) = parameter.rows  # vocabulary tensors are never fused
    kept = replace(whole, count=min(whole.count, rows))
    return replace(parameter, shape=(rows, *parameter.shape[1:]), rows=(kept,))
