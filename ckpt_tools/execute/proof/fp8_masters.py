"""The masters of one tensor against weights that its writer may hold in FP8, unit by unit of its stored chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ckpt_tools.execute.move.source_reader import index_of
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.kernels.casts import Array, cast, raw_dtype
from ckpt_tools.model.kernels.fp8_weights import (
    BLOCKED,
    Extremes,
    Verdict,
    blocks_fit,
    extremes,
    few_mantissas,
    is_quantized,
    judge,
    merged,
)
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.transfers import Computation, Transfer

HALF_TYPES = ("bfloat16", "float16")  # of models that can be held in FP8


class _Part(NamedTuple):
    """What one box holds of one stored chunk: a rank's own scale, or its own blocks, stand behind it."""

    item: Item
    box: Box  # relative to the box that was read
    column: int | None  # of its first element in the chunk; None where rows do not follow the chunk's


class Fp8Comparison:
    """Collects every chunk's table, judges it, and finds the element that no scale explains."""

    def __init__(
        self,
        target: TargetTensor,
        dtype: str,
        masters: Callable[[Box], Array],
        weights: Callable[[Box], Array],
        transfers: Callable[[Box], Sequence[Transfer | Computation]],
        recipe: str,
    ) -> None:
        self._target, self._dtype = target, dtype
        self._masters, self._weights, self._transfers = masters, weights, transfers
        self._width = BLOCKED.get(recipe)
        self._lock = threading.Lock()
        self._tables: dict[Item, list[Extremes]] = {}
        self._unfit: set[Item] = set()  # chunks with a block that no power of two explains
        self._bounds: dict[Item, Verdict] = {}  # chunks with elements that nothing explains
        self._runs = [0, 0]  # of weights: with few mantissas, and in all
        self.elements = 0
        self.is_proven = False
        self.is_exact = True

    def collect(self, boxes: Iterable[Box]) -> None:
        """Add what the boxes hold to the tables of their chunks."""
        for box in boxes:
            for part, masters, weights in self._read(box):
                table = extremes(masters, weights, self._dtype)
                fits = self._width is not None and part.column is not None
                fits = fits and blocks_fit(masters, weights, self._dtype, self._width or 1, part.column or 0)
                with self._lock:
                    tables = self._tables.setdefault(part.item, [])
                    tables.append(table)
                    self.elements += table.elements
                    if len(tables) > 64:
                        tables[:] = [merged(tables)]
                    if not fits:
                        self._unfit.add(part.item)
                    for i, count in enumerate(few_mantissas(weights, self._dtype)):
                        self._runs[i] += count

    def judge(self) -> None:
        """Decide whether every chunk is explained, exactly or, where the weights are FP8 numbers, by position."""
        tables = {item: merged(found) for item, found in self._tables.items()}
        if not is_quantized(merged(tables.values())):
            return
        verdicts = {item: judge(tables[item], self._dtype) for item in tables if item in self._unfit}
        self.is_exact = all(verdict.exact for verdict in verdicts.values())
        few, runs = self._runs
        if not self.is_exact and (few == 0 or few < 0.9 * runs):
            return
        self._bounds = {item: verdict for item, verdict in verdicts.items() if not verdict.fits}
        self.is_proven = not self._bounds

    def locate(self, boxes: Iterable[Box]) -> str | None:
        """The first element of the boxes that no scale explains."""
        if not self._bounds:
            return None
        for box in boxes:
            for part, masters, weights in self._read(box):
                if part.item not in self._bounds:
                    continue
                outside = _outside(self._bounds[part.item], masters, weights, self._dtype)
                if outside.any():
                    at = np.unravel_index(int(outside.argmax()), part.box.size)
                    whole = Box(
                        tuple(a + b for a, b in zip(box.start, part.box.start, strict=True)), part.box.size
                    )
                    line = describe_element(
                        self._target, self._dtype, masters, weights, whole, tuple(map(int, at))
                    )
                    return f"{line}, which no FP8 scale explains"
        return None

    def _read(self, box: Box) -> Iterator[tuple[_Part, Array, Array]]:
        masters, weights = self._masters(box), self._weights(box)
        for part in map(_part, self._transfers(box)):
            where = index_of(part.box)
            yield part, np.ascontiguousarray(masters[where]), np.ascontiguousarray(weights[where])


def _part(found: Transfer | Computation) -> _Part:
    assert isinstance(found, Transfer)  # weights are stored
    columns, piece = found.shape[-1], found.piece
    column = piece.offset % columns
    is_row = piece.strides[-1] == 1 and column + piece.box.size[-1] <= columns
    return _Part(found.item, piece.box, column if is_row else None)


def _outside(bounds: Verdict, masters: Array, weights: Array, dtype: str) -> Array:
    row = np.searchsorted(bounds.bits, weights.view(raw_dtype(dtype)))
    return ~((masters >= bounds.low[row]) & (masters <= bounds.high[row]))


def describe_element(
    target: TargetTensor, dtype: str, masters: Array, weights: Array, box: Box, at: tuple[int, ...]
) -> str:
    """One element of `box`, at `at` in it, with its two values."""
    element = ", ".join(str(i + a) for i, a in zip(at, box.start, strict=True))
    master = cast(masters[at].reshape(1), target.dtype, "float64").item()
    weight = cast(weights[at].reshape(1), dtype, "float64").item()
    return f"{target.key}[{element}]: master {master!r}, stored {dtype} weight {weight!r}"
