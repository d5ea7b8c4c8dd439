"""Proof that fp32 masters belong to the stored weights: rounded to the weights' type they are equal bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ckpt_tools.box import Box, full_box
from ckpt_tools.catalog.files import Files
from ckpt_tools.catalog.model import Catalog
from ckpt_tools.errors import VerificationError, list_problems
from ckpt_tools.execute.casts import Array, cast, raw_dtype
from ckpt_tools.execute.read_box import BoxReader
from ckpt_tools.megatron.target import TargetTensor
from ckpt_tools.plan.byte_runs import row_major_tiles

_TILE_ELEMS = 1 << 18  # compared at a time: what a comparison holds of them stays in the cache
_PART_ELEMS = 1 << 24  # compared by one thread in a row
_SAMPLE_ELEMS = 4096  # per sampled place
_SAMPLE_PLACES = 4


@dataclass(frozen=True, slots=True)
class MastersReport:
    """What was compared."""

    tensors: int = 0
    elements: int = 0
    elements_in_all: int = 0


def check_masters(
    files: Files,
    catalog: Catalog,
    targets: Sequence[TargetTensor],
    level: str,
    tick: Callable[[], None] = lambda: None,
    threads: int = 1,
) -> MastersReport:
    """Compare the masters among `targets` with the weights they must round to.

    Args:
        level: `sample` (a few rows of every tensor), `all` or `none`.
        tick: called often, by any thread; may raise to stop.

    Raises:
        VerificationError: some elements differ; every tensor concerned is named with its first such element.
    """
    report, problems = compare_masters(files, catalog, targets, level, tick, threads)
    if problems:
        raise VerificationError(
            f"the master weights of {len(problems)} tensors do not round to the stored weights:\n"
            f"{list_problems(problems)}\nEither the checkpoint is damaged or its masters belong to another step; "
            "`--check-masters none` converts it all the same, with the masters."
        )
    return report


def compare_masters(
    files: Files,
    catalog: Catalog,
    targets: Sequence[TargetTensor],
    level: str,
    tick: Callable[[], None] = lambda: None,
    threads: int = 1,
) -> tuple[MastersReport, list[str]]:
    """As `check_masters`, with a line per tensor that does not round instead of an error."""
    wanted = [t for t in targets if t.must_round_to] if level != "none" else []
    reader = BoxReader(files, catalog)

    def compare_part(part: tuple[_Comparison, Box]) -> tuple[int, str | None]:
        comparison, whole = part
        elements = 0
        for box in sample_boxes(whole) if level == "sample" else row_major_tiles(whole, _TILE_ELEMS):
            tick()
            elements += box.volume
            problem = comparison.difference(box)
            if problem is not None:
                return elements, problem
        return elements, None

    try:
        parts = [part for target in wanted for part in _parts(reader, target, level)]
        with ThreadPoolExecutor(threads) as pool:  # an error ends `map`, which calls off what has not begun
            compared = list(pool.map(compare_part, parts))
    finally:
        reader.close()
    first: dict[_Comparison, str] = {}
    for (comparison, _), (_, problem) in zip(parts, compared, strict=True):
        if problem is not None:
            first.setdefault(comparison, problem)
    elements = sum(count for count, _ in compared)
    in_all = sum(math.prod(t.shape) for t in wanted)
    return MastersReport(len(wanted), elements, in_all), list(first.values())


def _parts(reader: BoxReader, target: TargetTensor, level: str) -> Iterator[tuple[_Comparison, Box]]:
    """A tensor in the parts that one thread compares, in order."""
    stored = reader.catalog.tensors.get(target.sources[0].key)  # the target may ask for another type
    comparison = _Comparison(reader, target if stored is None else replace(target, dtype=stored.dtype))
    everything = full_box(target.shape)
    for part in [everything] if level == "sample" else row_major_tiles(everything, _PART_ELEMS):
        yield comparison, part


def sample_boxes(box: Box) -> list[Box]:
    """A few places of a tensor: parts of its first and last row (last dimension) and of rows evenly between."""
    if box.volume <= _SAMPLE_ELEMS * _SAMPLE_PLACES:
        return [box]
    *lead, columns = box.size
    width = min(columns, _SAMPLE_ELEMS)
    across = -(-columns // width)
    last = math.prod(lead) * across - 1
    boxes = []
    for place in sorted({last * i // (_SAMPLE_PLACES - 1) for i in range(_SAMPLE_PLACES)}):
        row, part = divmod(place, across)
        corner = map(int, np.unravel_index(row, lead)) if lead else ()
        boxes.append(Box((*corner, min(part * width, columns - width)), (*(1,) * len(lead), width)))
    return boxes


class _Comparison:
    """The masters of a target against the weights they round to."""

    def __init__(self, reader: BoxReader, target: TargetTensor) -> None:
        assert target.must_round_dtype is not None  # given with must_round_to
        self._target, self._dtype = target, target.must_round_dtype
        weights = replace(target, dtype=self._dtype, sources=target.must_round_to)
        self._masters, self._weights = reader.tensor(target), reader.tensor(weights)

    def difference(self, box: Box) -> str | None:
        """The first element of `box` whose master does not round to its weight; any NaN equals any other."""
        masters, weights = self._masters(box), self._weights(box)
        rounded = cast(masters, self._target.dtype, self._dtype)
        bits = raw_dtype(self._dtype)
        different = rounded.view(bits) != weights.view(bits)
        if different.any():
            different &= ~(_is_nan(rounded, self._dtype) & _is_nan(weights, self._dtype))
        if not different.any():
            return None
        at = np.unravel_index(int(different.argmax()), box.size)
        element = ", ".join(str(int(i) + a) for i, a in zip(at, box.start, strict=True))
        master = cast(masters[at].reshape(1), self._target.dtype, "float64").item()
        weight = cast(weights[at].reshape(1), self._dtype, "float64").item()
        return f"{self._target.key}[{element}]: master {master!r}, stored {self._dtype} weight {weight!r}"


def _is_nan(values: Array, dtype: str) -> Array:
    return np.isnan(cast(values, dtype, "float32"))
