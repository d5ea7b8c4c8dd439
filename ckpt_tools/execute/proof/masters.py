"""Proof that fp32 masters belong to the stored weights: rounded to the weights' type they are equal bit for bit.

Of two bf16 weights that are as near, either may be stored. Weights that are held in FP8 are one more rounding away; a
tensor that does not round is compared again with that in mind.

Masters equal their weights nearly always, and no element has to be put in its place to see that (`in_step`): where
all tensors are cut the same way, or lie in the order of their elements, every block is one read of each. Otherwise a
tile at a time is read in the order of the file, and what is in one piece on all sides is compared there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, chain, zip_longest
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ckpt_tools.errors import (
    NEVER_FINDINGS,
    CkptError,
    UnsupportedCheckpointError,
    VerificationError,
    list_problems,
)
from ckpt_tools.execute.move.read_box import BoxReader, Region, Run
from ckpt_tools.execute.move.source_reader import index_of
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.processes.team import by_threads, even_shares, with_workers
from ckpt_tools.execute.write_job import WriteOptions
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.human import counted
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.choices import CheckLevel
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.kernels.casts import Array, cast, numpy_dtype, raw_dtype
from ckpt_tools.model.kernels.fp8_weights import (
    Survey,
    merged,
    survey,
    too_far,
)
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.transfers import Transfer
from ckpt_tools.plan.byte_runs import is_run, row_major_tiles
from ckpt_tools.plan.overlap import ChunkFinder, TargetReader, transfers_into


def rounding_mismatch(masters: Array, master_dtype: str, weights: Array, dtype: str) -> Array:
    """Where masters do not round to weights; any NaN equals any other."""
    if (master_dtype, dtype) == ("float32", "bfloat16") and surely_rounds(masters, weights):
        return np.zeros(masters.shape, bool)
    rounded = cast(masters, master_dtype, dtype)
    bits = raw_dtype(dtype)
    different: Array = rounded.view(bits) != weights.view(bits)
    if different.any():
        different &= ~(_is_nan(rounded, dtype) & _is_nan(weights, dtype))
        if (master_dtype, dtype) == ("float32", "bfloat16"):
            different &= ~_is_tie(masters, weights)
    return different


def surely_rounds(masters: Array, weights: Array) -> bool:
    """Whether fp32 masters hold no NaN and lie at most half a step from their bf16 weights, the next ones then.

    Masters of finite weights are finite then, too. Bits of one sign are ordered like the numbers, so a difference of
    bits tells, in fewer passes than rounding. That between a NaN and a zero of the other sign is small, so NaNs are
    looked for: they are what the largest of numbers is, if there is one among them.
    """
    flat = np.ascontiguousarray(masters).reshape(-1)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        if not flat.size or np.isnan(flat.max()):
            return False
    apart = weights.reshape(-1).view(np.uint16).astype(np.uint32)
    apart <<= 16
    np.subtract(flat.view(np.uint32), apart, out=apart)
    apart += 1 << 15
    return bool(apart.max() <= 1 << 16)


def odd_of_two(masters: Array, master_dtype: str, weights: Array, dtype: str) -> Array:
    """Of weights that `rounding_mismatch` takes: where two are as near to the master, and it is not the even one.

    Places in the flattened arrays.
    """
    if (master_dtype, dtype) != ("float32", "bfloat16"):
        return np.zeros(0, np.intp)
    at = np.flatnonzero(masters.view(np.uint32).astype(np.uint16) == 1 << 15)
    odd: Array = at[(weights.reshape(-1)[at] & 1 == 1) & ~np.isnan(masters.reshape(-1)[at])]
    return odd


def _is_tie(masters: Array, weights: Array) -> Array:
    """Where fp32 masters lie in the middle of two bf16 numbers and the weight is one of them.

    torch takes the even one, the fused Adam that splits masters in weight and remainder the one further from zero.
    """
    bits = masters.view(np.uint32)
    lower, upper = bits >> 16, (bits >> 16) + 1
    tie: Array = (bits & 0xFFFF == 1 << 15) & ((weights == lower) | (weights == upper))
    return tie


def _is_nan(values: Array, dtype: str) -> Array:
    return np.isnan(cast(values, dtype, "float32"))


_BLOCK_ELEMS = 1 << 16  # of each tensor: with what is made of them they fit a cache of 1 MiB
_TILE_ELEMS = 1 << 18  # compared at a time: what a comparison holds of them stays in the cache


class Seen(NamedTuple):
    reader: BoxReader
    tensor: TargetTensor


def in_step(seen: Sequence[Seen], box: Box) -> Iterator[tuple[Array, ...]]:
    """The elements of `box`, each once and in some order, as blocks of raw bits: the same ones of every tensor.

    Blocks of one shape, at any strides, are valid until the next. It ends early where something cannot be read: who
    has not got all elements reads them in order, which says what is wrong.
    """
    with suppress(CkptError):
        runs = [one.reader.runs(one.tensor, box) for one in seen]
        boxes = [[run.box for run in side] for side in runs]
        same_cuts = all(side == boxes[0] for side in boxes)
        if all(boxes) and (same_cuts or all(is_run(b, box.size) for side in boxes for b in side)):
            yield from _by_runs(runs, [raw_dtype(one.tensor.dtype) for one in seen])
            return
        reads = [one.reader.regions(one.tensor, box) for one in seen]
        for tile in row_major_tiles(box, _TILE_ELEMS):
            yield from _common([read(tile) for read in reads])


def _common(sides: Sequence[Sequence[Region]]) -> Iterator[tuple[Array, ...]]:
    """The elements of every side in each box that is inside of one region of all."""
    common: list[tuple[Box, tuple[Array, ...]]] = [(region.box, (region.elements,)) for region in sides[0]]
    for side in sides[1:]:
        common = [
            (both, (*(_cut(one, box, both) for one in elements), _cut(region.elements, region.box, both)))
            for box, elements in common
            for region in side
            if (both := box.intersect(region.box)) is not None
        ]
    for _, elements in common:
        yield elements


def _cut(elements: Array, box: Box, part: Box) -> Array:
    return elements if part == box else elements[index_of(part.relative_to(box))]


def _by_runs(runs: Sequence[Sequence[Run]], types: Sequence[np.dtype[Any]]) -> Iterator[tuple[Array, ...]]:
    """Blocks of tensors that lie in runs, which are sorted by where they begin: they follow each other, as they tile
    one box, and are either the same of every tensor or row-major ranges."""
    ends = [list(accumulate(run.box.volume for run in side)) for side in runs]
    buffers = [np.empty(_BLOCK_ELEMS, dtype) for dtype in types]
    places, at = [0] * len(runs), 0
    while at < ends[0][-1]:
        left = [end[place] - at for end, place in zip(ends, places, strict=True)]
        count = min(_BLOCK_ELEMS, *left)
        blocks = tuple(buffer[:count] for buffer in buffers)
        for side, place, remaining, block in zip(runs, places, left, blocks, strict=True):
            side[place].read(side[place].box.volume - remaining, block)
        yield blocks
        at += count
        places = [place + (n == count) for place, n in zip(places, left, strict=True)]


def describe_element(
    target: TargetTensor, dtype: str, masters: Array, weights: Array, box: Box, at: tuple[int, ...]
) -> str:
    """One element of `box`, at `at` in it, with its two values."""
    element = ", ".join(str(i + a) for i, a in zip(at, box.start, strict=True))
    master = cast(masters[at].reshape(1), target.dtype, "float64").item()
    weight = cast(weights[at].reshape(1), dtype, "float64").item()
    return f"{target.key}[{element}]: master {master!r}, stored {dtype} weight {weight!r}"


_PART_ELEMS = 1 << 22  # compared by one thread in a row
_SAMPLE_ELEMS = 4096  # per sampled place
_SAMPLE_PLACES = 4
_REMAINDERS = ": all are whole numbers of 16 bits"


@dataclass(frozen=True, slots=True)
class MastersReport:
    tensors: int = 0
    elements: int = 0
    elements_in_all: int = 0
    fp8: int = 0  # of `tensors`, with weights held in FP8
    accepted: int = 0  # of `elements`, with a weight that belongs to its master and is not this rounded
    saturated: int = 0  # of `accepted`, with a master beyond the largest number of its weight's FP8 scale


def check_masters(
    files: Files,
    catalog: Catalog,
    targets: Sequence[TargetTensor],
    level: CheckLevel,
    tick: Callable[[], None] = lambda: None,
    threads: int = 1,
    fp8_recipe: str | None = None,
    advice: str | None = None,
) -> MastersReport:
    """Compare the masters among `targets` with the weights they must round to.

    Args:
        level: `sample` (a few rows of every tensor), `all` or `none`.
        tick: called often, by any thread; may raise to stop.
        fp8_recipe: what the writer's linear layers may be held in FP8 by (`ModelSettings.fp8_recipe`).
        advice: what else can be done when some do not round.
    """
    report, problems = compare_masters(files, catalog, targets, level, tick, threads, fp8_recipe)
    refuse_masters(problems, advice)
    return report


def refuse_masters(problems: Sequence[str], advice: str | None = None) -> None:
    """Raise the error of `check_masters` if `compare_masters` has found problems."""
    if not problems:
        return
    advice = advice or "With --weights-only the stored weights are converted, without an optimizer."
    if all(line.endswith(_REMAINDERS) for line in problems):
        raise UnsupportedCheckpointError(
            f"in place of {len(problems)} masters the optimizer holds their lower halves, as the precision-aware "
            f"optimizer stores them (int16 remainders); they are joined with the weights where the args say "
            f"--use-precision-aware-optimizer, which these do not.\n{advice}"
        )
    raise VerificationError(
        f"the master weights of {len(problems)} tensors do not round to the stored weights:\n"
        f"{list_problems(problems)}\nEither the checkpoint is damaged or its masters belong to another step. "
        f"{advice}",
        problems,
    )


def describe_masters(report: MastersReport, level: CheckLevel) -> str:
    if not report.tensors:
        return "the source has none"
    how = "all" if report.elements == report.elements_in_all else level  # of small tensors a sample is all
    rounds = f"{report.elements:,} elements of {report.tensors:,} masters round to the stored weights ({how})"
    if report.fp8:
        rounds += (
            f"; {report.fp8:,} of the weights are held in FP8: their masters lie within half a step of E4M3"
        )
    if report.saturated:
        rounds += f", except {counted(report.saturated, 'element')} above its largest number (saturated)"
    return rounds


def compare_masters(
    files: Files,
    catalog: Catalog,
    targets: Sequence[TargetTensor],
    level: CheckLevel,
    tick: Callable[[], None] = lambda: None,
    threads: int = 1,
    fp8_recipe: str | None = None,
) -> tuple[MastersReport, list[str]]:
    """As `check_masters`, with a line per tensor that does not round instead of an error."""
    wanted = [t for t in targets if t.must_round_to] if level != "none" else []
    reader = BoxReader(files, catalog)

    def boxes(whole: Box) -> Iterator[Box]:
        for box in sample_boxes(whole) if level == "sample" else row_major_tiles(whole, _TILE_ELEMS):
            tick()
            yield box

    try:
        comparisons = [_comparison(reader, target) for target in wanted]
        found, first = _compare_plainly(comparisons, level, boxes, threads, reader.is_remote, tick)
        proven = _compare_as_fp8(first, level, boxes, threads) if fp8_recipe else {}
    finally:
        reader.close()
    elements, accepted, saturated = (sum(n) for n in zip((0, 0, 0), *(found | proven).values(), strict=True))
    report = MastersReport(
        tensors=len(wanted),
        elements=elements,
        elements_in_all=sum(math.prod(t.shape) for t in wanted),
        fp8=len(proven),
        accepted=accepted,
        saturated=saturated,
    )
    return report, list(first.values())


def compare_all_masters(
    files: Files,
    catalog: Catalog,
    targets: Sequence[TargetTensor],
    threads: int,
    workers: int | None = None,
    fp8_recipe: str | None = None,
    rounded: Set[tuple[Item, Item]] = frozenset(),
) -> tuple[MastersReport, list[str]]:
    """`compare_masters` of every element, shared by as many workers as help; called where none are.

    `rounded` are pairs of items with the same elements in the same order: masters that are known to round to their
    weights. Targets that consist of them are not read again.
    """
    left, known = list[TargetTensor](), 0
    for target in targets:
        if rounded and _is_made_of(catalog, target, rounded):
            known += math.prod(target.shape)
        else:
            left.append(target)
    report = MastersReport(len(targets) - len(left), known, known)
    if not left:
        return report, []
    nbytes = sum(math.prod(target.shape) * (itemsize(target.dtype) + 2) for target in left)
    shared, lines = None, list[str]()
    with with_workers(nbytes, WriteOptions(threads=threads, workers=workers), Ranks()) as (ranks, _):
        try:
            shared, lines = compare_shared(files, catalog, left, "all", ranks, threads, fp8_recipe)
        except NEVER_FINDINGS:
            raise
        except CkptError:
            if ranks.world == 1:
                raise
    if shared is None:  # which tensor is named shall not depend on who has met which first
        shared, lines = compare_masters(files, catalog, left, "all", threads=threads, fp8_recipe=fp8_recipe)
    return _sum_of([report, shared]), lines


def compare_shared(
    files: Files,
    catalog: Catalog,
    targets: Sequence[TargetTensor],
    level: CheckLevel,
    ranks: Ranks,
    threads: int,
    fp8_recipe: str | None = None,
) -> tuple[MastersReport, list[str]]:
    """`compare_masters` on all ranks, each its share: as many targets, or with every element as many bytes."""
    sizes = [1] * len(targets)
    if level == "all":
        sizes = [math.prod(target.shape) * (itemsize(target.dtype) + 2) for target in targets]
    mine = [targets[number] for number in even_shares(sizes, ranks.world)[ranks.rank]]

    def compare() -> tuple[tuple[int, ...], list[str]]:
        report, lines = compare_masters(files, catalog, mine, level, ranks.check, threads, fp8_recipe)
        return astuple(report), lines

    shares = ranks.together(compare)
    numbers = {target.key: number for number, target in enumerate(targets)}
    lines = sorted(
        chain.from_iterable(lines for _, lines in shares),
        key=lambda line: numbers.get(line.partition("[")[0], len(numbers)),
    )
    return _sum_of(MastersReport(*report) for report, _ in shares), lines


def _sum_of(reports: Iterable[MastersReport]) -> MastersReport:
    return MastersReport(*map(sum, zip(*map(astuple, reports), strict=True)))


def _is_made_of(catalog: Catalog, target: TargetTensor, rounded: Set[tuple[Item, Item]]) -> bool:
    """Whether every master lies in an item of a pair where its weight lies in the other; not if nobody knows."""
    assert target.must_round_dtype is not None  # given with must_round_to
    weights = replace(target, dtype=target.must_round_dtype, sources=target.must_round_to)
    box, finder = full_box(target.shape), ChunkFinder(catalog)
    try:
        sides = [transfers_into(TargetReader(finder, tensor), box) for tensor in (target, weights)]
    except CkptError:  # comparing them will raise it
        return False
    return sum(one.box.volume for one in sides[0]) == box.volume and all(
        isinstance(master, Transfer)
        and isinstance(weight, Transfer)
        and (master.item, weight.item) in rounded
        and (master.piece, master.shape) == (weight.piece, weight.shape)
        and weight.dtype == target.must_round_dtype
        for master, weight in zip_longest(*sides)
    )


_Boxes: TypeAlias = Callable[[Box], Iterator[Box]]
_Counts: TypeAlias = tuple[int, int, int]  # `elements`, `accepted` and `saturated` of a `MastersReport`


def _compare_plainly(
    comparisons: Sequence[_Comparison],
    level: CheckLevel,
    boxes: _Boxes,
    threads: int,
    is_remote: bool,
    tick: Callable[[], None],
) -> tuple[dict[_Comparison, _Counts], dict[_Comparison, str]]:
    """What was compared of every tensor, and the first difference of each that has one."""

    def compare(part: tuple[_Comparison, Box]) -> tuple[int, int, str | None]:
        elements = accepted = 0
        # A store's reads are requested in the order of `boxes`, and wait for the network in any case.
        if level == "all" and not is_remote and part[0].rounds_in_step(part[1], tick):
            return part[1].volume, 0, None
        for box in boxes(part[1]):
            elements += box.volume
            odd, problem = part[0].difference(box)
            if problem is not None:
                return elements, 0, problem
            accepted += odd
        return elements, accepted, None

    def reads(part: tuple[_Comparison, Box]) -> Iterator[Range]:
        return chain.from_iterable(part[0].reads(box) for box in boxes(part[1]))

    parts = [(c, box) for c in comparisons for box in _parts(c, level)]
    ahead = WriteOptions(threads=threads).thread_memory(reads_store=is_remote).ahead
    compared = by_threads(compare, parts, threads, reads, ahead)
    found: dict[_Comparison, _Counts] = dict.fromkeys(comparisons, (0, 0, 0))
    first: dict[_Comparison, str] = {}
    for (comparison, _), (elements, accepted, problem) in zip(parts, compared, strict=True):
        found[comparison] = found[comparison][0] + elements, found[comparison][1] + accepted, 0
        if problem is not None:
            first.setdefault(comparison, problem)
    return found, first


def _compare_as_fp8(
    first: dict[_Comparison, str], level: CheckLevel, boxes: _Boxes, threads: int
) -> dict[_Comparison, _Counts]:
    """The tensors of `first` again, as weights held in FP8: those that are proven leave it; the counts of each."""
    parts = [(c, box) for c in first if c.can_be_fp8 for box in _parts(c, level)]
    shards: dict[_Comparison, dict[Item, list[Survey]]] = {}
    surveyed = by_threads(lambda part: part[0].survey(boxes(part[1])), parts, threads)
    for (comparison, _), found in zip(parts, surveyed, strict=True):
        for item, one in found.items():
            shards.setdefault(comparison, {}).setdefault(item, []).append(one)
    held = {c: {item: merged(some) for item, some in found.items()} for c, found in shards.items()}
    whole = {c: merged(found.values()) for c, found in held.items()}
    parts = [part for part in parts if part[0] in whole and whole[part[0]].is_fp8]
    located = by_threads(lambda part: part[0].too_far(boxes(part[1]), held[part[0]]), parts, threads)
    saturated = dict.fromkeys((comparison for comparison, _ in parts), 0)
    for (comparison, _), (problem, count) in reversed(list(zip(parts, located, strict=True))):
        if problem is not None:
            first[comparison] = problem
            saturated.pop(comparison, None)
        elif comparison in saturated:
            saturated[comparison] += count
    for comparison in saturated:
        del first[comparison]
    return {
        one: (whole[one].elements, whole[one].elements - whole[one].equal, count)
        for one, count in saturated.items()
    }


def _comparison(reader: BoxReader, target: TargetTensor) -> _Comparison:
    stored = reader.catalog.tensors.get(target.sources[0].key)  # the target may ask for another type
    return _Comparison(reader, target if stored is None else replace(target, dtype=stored.dtype))


def _parts(comparison: _Comparison, level: CheckLevel) -> Iterable[Box]:
    """A tensor in the parts that one thread compares, in order."""
    everything = full_box(comparison.target.shape)
    most = max(_PART_ELEMS, everything.volume >> 14)  # metadata may say any shape: parts are few all the same
    return [everything] if level == "sample" else row_major_tiles(everything, most)


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
        self.target, self.dtype = target, target.must_round_dtype
        weights = replace(target, dtype=self.dtype, sources=target.must_round_to)
        self.masters, self.weights = reader.tensor(target), reader.tensor(weights)
        self._in_step = Seen(reader, target), Seen(reader, weights)
        self._transfers = reader.transfers(weights)
        self._reads = reader.reads(target), reader.reads(weights)

    @property
    def can_be_fp8(self) -> bool:
        """Whether Transformer Engine could hold such a weight in FP8: a matrix with fp32 masters."""
        return (
            len(self.target.shape) >= 2
            and self.target.dtype == "float32"
            and self.dtype in ("bfloat16", "float16")
        )

    def rounds_in_step(self, box: Box, tick: Callable[[], None]) -> bool:
        """Whether a quick look at all of `box` shows that it has no difference; if not, nothing is known."""
        types = self.target.dtype, self.dtype
        elements = 0
        for blocks in in_step(self._in_step, box):
            tick()
            masters, weights = (b.view(numpy_dtype(dtype)) for b, dtype in zip(blocks, types, strict=True))
            if rounding_mismatch(masters, types[0], weights, types[1]).any():
                return False
            if odd_of_two(masters, types[0], weights, types[1]).size:
                return False
            elements += masters.size
        return elements == box.volume

    def reads(self, box: Box) -> Iterator[Range]:
        return chain.from_iterable(reads(box) for reads in self._reads)

    def difference(self, box: Box) -> tuple[int, str | None]:
        """How many weights of `box` are the odd one of two as near, and the first that is not its master rounded.

        All NaNs are equal.
        """
        masters, weights = self.masters(box), self.weights(box)
        different = rounding_mismatch(masters, self.target.dtype, weights, self.dtype)
        if not different.any():
            return odd_of_two(masters, self.target.dtype, weights, self.dtype).size, None
        at = np.unravel_index(int(different.argmax()), box.size)
        line = describe_element(self.target, self.dtype, masters, weights, box, tuple(map(int, at)))
        return 0, line + _REMAINDERS if _are_remainders(masters) else line

    def survey(self, boxes: Iterable[Box]) -> dict[Item, Survey]:
        """What the weights are like in each stored chunk, as one rank has its own scales."""
        found: dict[Item, list[Survey]] = {}
        for item, _, masters, weights in self._by_chunk(boxes):
            found.setdefault(item, []).append(survey(masters, weights, self.dtype))
        return {item: merged(some) for item, some in found.items()}

    def too_far(self, boxes: Iterable[Box], shards: Mapping[Item, Survey]) -> tuple[str | None, int]:
        """The first master that is farther from its weight than half a step of FP8, and how many are saturated."""
        count = 0
        for item, box, masters, weights in self._by_chunk(boxes):
            outside, saturated = too_far(masters, weights, self.dtype, shards[item])
            count += saturated
            if outside.any():
                at = tuple(map(int, np.unravel_index(int(outside.argmax()), box.size)))
                line = describe_element(self.target, self.dtype, masters, weights, box, at)
                return f"{line}, which no FP8 scale explains", 0
        return None, count

    def _by_chunk(self, boxes: Iterable[Box]) -> Iterator[tuple[Item, Box, Array, Array]]:
        """The elements of boxes, those of every stored chunk of the weights apart."""
        for box in boxes:
            masters, weights = self.masters(box), self.weights(box)
            for part in self._transfers(box):
                assert isinstance(part, Transfer)  # weights are stored
                where = index_of(part.box)
                yield part.item, part.box.shift(box.start), masters[where], weights[where]


def _are_remainders(masters: Array) -> bool:
    """Whether fp32 numbers are all int16 ones, and not all small: no weights of a model are."""
    if masters.dtype != np.float32 or not np.isfinite(masters).all():
        return False
    largest = np.abs(masters).max(initial=0)
    return bool(256 < largest <= 1 << 15) and bool((masters == np.rint(masters)).all())
