"""Are two checkpoints the same: tensor by tensor through views, value by value, in bounded memory.

Where a format keeps masters in the place of weights, masters are compared, and the weights that a side stores next to
its own would go unseen. They are compared bit by bit where both sides store them, else with the masters of the side
that does not, which must belong to them; those that are not their master, rounded, count (`Extremes.accepted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import numpy as np

from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.move.source_reader import index_of
from ckpt_tools.execute.processes.team import Tick, start_jobs
from ckpt_tools.execute.proof.masters import Seen, compare_all_masters, in_step, odd_of_two, rounding_mismatch
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import load_object
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Catalog, Item, ObjectEntry
from ckpt_tools.model.choices import DiffBy
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.kernels.casts import Array, cast, numpy_dtype, raw_dtype
from ckpt_tools.model.roles import MASTER, WEIGHT, Role
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.verify.compare.arrays import Comparison, Extremes, Tolerance, are_same_bits
from ckpt_tools.verify.compare.objects import ValueDiff, diff_values, text_of
from ckpt_tools.verify.content.values import Part, bytes_of, part_reads, parts_of

AnyTensor = TargetTensor | InlineTensor


def weight_behind(tensor: AnyTensor) -> TargetTensor | None:
    """The stored weight that a master must round to; None where the tensor is not such a master."""
    if not isinstance(tensor, TargetTensor) or tensor.must_round_dtype is None:
        return None
    return replace(
        tensor,
        dtype=tensor.must_round_dtype,
        sources=tensor.must_round_to,
        must_round_to=(),
        must_round_dtype=None,
        role=WEIGHT,
    )


def has_weights(pair: Sequence[AnyTensor]) -> bool:
    """Whether a side stores weights next to the masters that are compared."""
    return any(weight_behind(tensor) is not None for tensor in pair)


def can_round(pair: Sequence[AnyTensor]) -> bool:
    """Whether the weights can be compared: both have one type, or rounding is known for all types."""
    weights = [weight.dtype for tensor in pair if (weight := weight_behind(tensor)) is not None]
    if len(weights) == len(pair) and len(set(weights)) == 1:
        return True
    return {*weights, *(tensor.dtype for tensor in pair)} <= CASTABLE


class WeightsComparison:
    """The weights behind a pair of tensors, tile by tile; `found` holds what differs so far."""

    def __init__(self, pair: Sequence[AnyTensor], readers: Sequence[BoxReader], tolerance: Tolerance) -> None:
        weights = [weight_behind(tensor) for tensor in pair]
        self._read: list[Callable[[Box], Array] | None] = [
            None if weight is None else reader.tensor(weight)
            for weight, reader in zip(weights, readers, strict=True)
        ]
        stored = [weight.dtype for weight in weights if weight is not None]
        self._dtypes = stored[0], stored[-1]
        self._masters = [tensor.dtype for tensor in pair]
        self._is_bitwise = tolerance.is_bitwise
        self._comparison = Comparison(self._dtypes, tolerance)

    @property
    def found(self) -> Extremes:
        """What differs so far."""
        return self._comparison.found

    def add(self, tile: Box, masters: Sequence[Array]) -> int:
        """Compare a tile, with masters already read as raw bits; return the bytes of weights that were read."""
        numbers = [m.view(numpy_dtype(dtype)) for m, dtype in zip(masters, self._masters, strict=True)]
        weights = [None if read is None else read(tile) for read in self._read]
        first, second = weights
        if first is None or second is None:
            own = 0 if second is None else 1
            mine = weights[own]
            assert mine is not None  # one side stores weights, else there is nothing to compare
            first = second = mine
            different = self._unlike(numbers, 1 - own, mine)
            if not self._is_bitwise:  # within the tolerance masters may lie on two sides of a weight's middle
                different &= self._unlike(numbers, own, mine)
            odd = odd_of_two(numbers[1 - own], self._masters[1 - own], mine, self._dtypes[0])
            self.found.accepted += int((~different.reshape(-1)[odd]).sum())
            if different.any():
                rounded = self._rounded(numbers[1 - own], self._masters[1 - own], mine, different)
                first, second = (rounded, mine) if own else (mine, rounded)
        raw = [w.view(raw_dtype(dtype)) for w, dtype in zip((first, second), self._dtypes, strict=True)]
        self._comparison.add(raw[0], raw[1], tile.start)
        return sum(w.nbytes for w in weights if w is not None)

    def _unlike(self, masters: Sequence[Array], side: int, weights: Array) -> Array:
        return rounding_mismatch(masters[side], self._masters[side], weights, self._dtypes[0])

    def _rounded(self, masters: Array, dtype: str, weights: Array, different: Array) -> Array:
        """The masters as weights, and the weights themselves where they are one of two equally near ones."""
        made: Array = np.where(different, cast(masters, dtype, self._dtypes[0]), weights)
        return made


_SHARED_BYTES = 16 << 10  # of an object that is kept, as others may have the same


@dataclass(frozen=True, slots=True)
class Side:
    """One of the checkpoints that are compared: its values by name."""

    files: Files
    catalog: Catalog
    tensors: Mapping[str, TargetTensor | InlineTensor]
    objects: Mapping[str, object]  # values, or `ObjectEntry`s still to be read
    trust_pickle: bool = False
    fp8_recipe: str | None = None  # if weights may be held in FP8 (`ModelSettings.fp8_recipe`)

    def value(self, name: str) -> object:
        """The Python value under a name."""
        value = self.objects[name]
        return (
            load_object(self.files, value.item, self.trust_pickle)
            if isinstance(value, ObjectEntry)
            else value
        )


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """What to compare (globs on names; `args.tp_size` for a field of `args`), and what counts as equal."""

    tolerance: Tolerance = field(default_factory=Tolerance)
    keys: tuple[str, ...] = ()  # () for all
    ignore: tuple[str, ...] = ()
    threads: int = 2
    workers: int | None = None  # processes forked on this machine; None: as many as help
    headers: bool = False  # names, shapes and types of tensors alone: no payload is read

    def wants(self, name: str) -> bool:
        chosen = not self.keys or any(fnmatchcase(name, glob) for glob in self.keys)
        return chosen and not any(fnmatchcase(name, glob) for glob in self.ignore)


Pair: TypeAlias = tuple[TargetTensor | InlineTensor, TargetTensor | InlineTensor]
DiffKind: TypeAlias = Literal["equal", "values", "dtype", "shape", "only in A", "only in B"]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor of two checkpoints, and how they differ."""

    name: str
    role: Role
    kind: DiffKind
    a: tuple[str, tuple[int, ...]] | None  # element type and shape
    b: tuple[str, tuple[int, ...]] | None
    elements: int = 0  # compared
    found: Extremes = field(default_factory=Extremes)


@dataclass(frozen=True, slots=True)
class DiffReport:
    """Everything compared, in the order of names."""

    a: str
    b: str
    by: DiffBy  # what names are: stored keys, or parameters of the running model
    tolerance: Tolerance
    tensors: tuple[TensorDiff, ...]
    values: tuple[ValueDiff, ...]
    values_compared: int
    notes: tuple[str, ...] = ()
    headers: bool = False  # values were not looked at

    @property
    def is_equal(self) -> bool:
        return not self.values and all(t.kind == "equal" for t in self.tensors)

    @property
    def accepted(self) -> tuple[int, int]:
        """Elements whose stored weight is not its master rounded though it belongs to it, and their tensors."""
        counts = [t.found.accepted for t in self.tensors if t.found.accepted]
        return sum(counts), len(counts)


def compare_headers(a: Side, b: Side, options: DiffOptions) -> tuple[TensorDiff, ...]:
    """What types and shapes say of every chosen tensor of either side."""
    names = [name for name in dict.fromkeys((*a.tensors, *b.tensors)) if options.wants(name)]
    judged = [_by_form(name, a.tensors.get(name), b.tensors.get(name)) for name in names]
    return tuple(
        replace(one, kind="dtype") if one.kind == "equal" and one.a != one.b else one for one in judged
    )


@contextmanager
def comparing(
    a: Side, b: Side, options: DiffOptions, tick: Tick = lambda _: None
) -> Iterator[Callable[[], tuple[TensorDiff, ...]]]:
    """Give the block a function that returns what there is of every chosen tensor of either side.

    Other processes compare already when the block starts. `tick` gets the bytes read. Weights that a side
    stores next to the masters that are compared get separate rows of the same name, after all others.

    Raises (the function):
        CkptError: a tensor cannot be read.
    """
    names = [name for name in dict.fromkeys((*a.tensors, *b.tensors)) if options.wants(name)]
    judged = [_by_form(name, a.tensors.get(name), b.tensors.get(name)) for name in names]
    pairs = [(a.tensors[one.name], b.tensors[one.name]) for one in judged if one.kind == "equal"]
    sides = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    behind = {
        number: Extremes() for number, pair in enumerate(pairs) if has_weights(pair) and can_round(pair)
    }
    readers = BoxReader(a.files, a.catalog), BoxReader(b.files, b.catalog)

    def compare(part: Part, count: Tick) -> tuple[Extremes, Extremes]:
        pair = pairs[part.number]
        comparison = Comparison((pair[0].dtype, pair[1].dtype), options.tolerance)
        if _are_equal(pair, readers, part, options.tolerance, part.number in behind, count):
            return Extremes(), Extremes()
        weights = WeightsComparison(pair, readers, options.tolerance) if part.number in behind else None
        read_a, read_b = (_read(reader, tensor) for reader, tensor in zip(readers, pair, strict=True))
        for tile in part.tiles():
            tiles = read_a(tile), read_b(tile)
            comparison.add(*tiles, tile.start)
            count(tiles[0].nbytes + tiles[1].nbytes)
            if weights is not None:
                count(weights.add(tile, tiles))
        return comparison.found, Extremes() if weights is None else weights.found

    weights_behind = [
        [weight_behind(t) if n in behind else None for n, t in enumerate(side)] for side in sides
    ]
    parts = parts_of(sides[0])

    def rows(found: Sequence[tuple[Extremes, Extremes]]) -> tuple[TensorDiff, ...]:
        differences = [Extremes() for _ in pairs]
        for part, (extremes, of_weights) in zip(parts, found, strict=True):
            differences[part.number].join(extremes)
            if part.number in behind:
                behind[part.number].join(of_weights)
        compared = iter(differences)
        bitwise = options.tolerance.is_bitwise
        weights = [(pairs[number], extremes) for number, extremes in behind.items()]
        return (
            *(_by_values(one, next(compared), bitwise) if one.kind == "equal" else one for one in judged),
            *_weight_rows(a, b, weights, options),
        )

    with ExitStack() as opened:
        for reader in readers:
            opened.callback(reader.close)
        results = opened.enter_context(
            start_jobs(
                compare,
                parts,
                sizes=bytes_of(parts, *sides),
                threads=options.threads,
                workers=options.workers,
                tick=tick,
                reads=part_reads(
                    *zip(readers, sides, strict=True), *zip(readers, weights_behind, strict=True)
                ),
            )
        )
        yield lambda: rows(results())


def _are_equal(
    pair: Pair,
    readers: tuple[BoxReader, BoxReader],
    part: Part,
    tolerance: Tolerance,
    with_weights: bool,
    count: Tick,
) -> bool:
    """Whether a quick look at all of a part shows that nothing in it differs; if not, nothing is known.

    It ends at the first difference, so that little is read twice of checkpoints that differ all over.
    """
    a, b = pair
    if not (isinstance(a, TargetTensor) and isinstance(b, TargetTensor)):
        return False
    if any(reader.is_remote for reader in readers):  # reads of stores are announced in the order of boxes
        return False
    seen = [Seen(readers[0], a), Seen(readers[1], b)]
    behind = [Seen(one.reader, weight) for one in seen if (weight := weight_behind(one.tensor)) is not None]
    behind = behind if with_weights else []
    types = [one.tensor.dtype for one in (*seen, *behind)]
    if not all(Comparison((t[0], t[-1]), tolerance).bits_decide for t in (types[:2], types[2:]) if t):
        return False
    elements = nbytes = 0
    for blocks in in_step([*seen, *behind], part.box):
        count(0)
        if not _are_alike(blocks, types):
            return False
        elements += blocks[0].size
        nbytes += sum(block.nbytes for block in blocks)
    if elements == part.box.volume:
        count(nbytes)
    return elements == part.box.volume


def _are_alike(blocks: Sequence[Array], types: Sequence[str]) -> bool:
    """Whether two blocks of raw bits are equal, and the weights behind both, or behind one: the masters rounded."""
    if not are_same_bits(blocks[0], blocks[1]):
        return False
    if len(blocks) != 3:
        return len(blocks) == 2 or are_same_bits(blocks[2], blocks[3])
    masters, weights = (blocks[n].view(numpy_dtype(types[n])) for n in (0, 2))
    return not (
        rounding_mismatch(masters, types[0], weights, types[2]).any()
        or odd_of_two(masters, types[0], weights, types[2]).size
    )


def _weight_rows(
    a: Side, b: Side, found: Sequence[tuple[Pair, Extremes]], options: DiffOptions
) -> Iterator[TensorDiff]:
    """The verdict on the weights behind masters; where one side stores none, they may be held in FP8."""
    wrong = [pair for pair, extremes in found if extremes.different and None in map(weight_behind, pair)]
    proven = _proven_as_fp8(a, b, wrong, options)
    for pair, extremes in found:
        forms = [_form(weight_behind(tensor) or tensor) for tensor in pair]
        row = TensorDiff(pair[0].key, WEIGHT, "equal", forms[0], forms[1])
        both = all(weight_behind(tensor) is not None for tensor in pair)
        fp8 = Extremes(accepted=extremes.different + extremes.accepted)
        differs = fp8 if row.name in proven else extremes
        yield _by_values(row, differs, is_bitwise=both and options.tolerance.is_bitwise)


def _proven_as_fp8(a: Side, b: Side, pairs: Sequence[Pair], options: DiffOptions) -> set[str]:
    """The names of weights that match the masters next to them, some of them by a scale of FP8.

    Where those masters are not the other side's, the masters' own row says so.
    """
    if not pairs or not (a.fp8_recipe or b.fp8_recipe):
        return set()
    failed = set[str]()
    for number, side in enumerate((a, b)):
        targets = [t for pair in pairs if isinstance(t := pair[number], TargetTensor) and t.must_round_to]
        _, problems = compare_all_masters(
            side.files, side.catalog, targets, options.threads, options.workers, side.fp8_recipe
        )
        failed |= {line.partition("[")[0] for line in problems}
    return {pair[0].key for pair in pairs} - failed


def _by_form(
    name: str, a: TargetTensor | InlineTensor | None, b: TargetTensor | InlineTensor | None
) -> TensorDiff:
    """What type and shape say of a tensor; "equal" where its values have the last word."""
    forms = [None if t is None else _form(t) for t in (a, b)]
    roles: list[Role] = [t.role for t in (a, b) if isinstance(t, TargetTensor)]
    role: Role = MASTER if MASTER in roles else next(iter(roles), "other")
    kind: DiffKind = "equal"
    if a is None or b is None:
        kind = "only in B" if a is None else "only in A"
    elif a.shape != b.shape:
        kind = "shape"
    elif a.dtype != b.dtype and not {a.dtype, b.dtype} <= CASTABLE:
        kind = "dtype"
    return TensorDiff(name, role, kind, forms[0], forms[1])


def _form(tensor: TargetTensor | InlineTensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _by_values(tensor: TensorDiff, found: Extremes, is_bitwise: bool) -> TensorDiff:
    """The verdict on a tensor of the same shape on both sides."""
    assert tensor.a is not None and tensor.b is not None
    kind: DiffKind = "values" if found.different else "equal"
    if tensor.a[0] != tensor.b[0] and is_bitwise:
        kind = "dtype"
    return replace(tensor, kind=kind, elements=math.prod(tensor.a[1]), found=found)


def _read(reader: BoxReader, tensor: TargetTensor | InlineTensor) -> Callable[[Box], Array]:
    """Raw bits of any box of the tensor."""
    raw = raw_dtype(tensor.dtype)
    if isinstance(tensor, TargetTensor):
        read = reader.tensor(tensor)
        return lambda box: read(box).view(raw)
    whole: Array = np.frombuffer(tensor.data, raw).reshape(tensor.shape)
    return lambda box: whole[index_of(box)]


def diff_objects(a: Side, b: Side, options: DiffOptions) -> tuple[tuple[ValueDiff, ...], int]:
    """What differs between the objects of both sides, and how many were compared."""
    found: list[ValueDiff] = []
    compared = 0
    value_a, value_b = _values_of(a), _values_of(b)
    for name in dict.fromkeys((*a.objects, *b.objects)):
        if not _may_want(name, options):
            continue
        compared += 1
        if name not in a.objects or name not in b.objects:
            value = text_of((value_a if name in a.objects else value_b)(name))
            difference = ValueDiff(name, *((value, None) if name in a.objects else (None, value)))
            found += [difference] if options.wants(name) else []
            continue
        differences = diff_values(name, value_a(name), value_b(name), options.tolerance)
        found += [d for d in differences if options.wants(d.name)]
    return tuple(found), compared


def _values_of(side: Side) -> Callable[[str], object]:
    """The value under a name; of small items that many names share, such as fields of groups, each is read once."""
    known: dict[Item, object] = {}

    def value(name: str) -> object:
        stored = side.objects[name]
        if not isinstance(stored, ObjectEntry) or stored.item.length > _SHARED_BYTES:
            return side.value(name)
        if stored.item not in known:
            known[stored.item] = side.value(name)
        return known[stored.item]

    return value


def weights_not_compared(a: Side, b: Side, options: DiffOptions) -> list[str]:
    """A note on stored weights behind masters that no rounding is known for."""
    names = [name for name in a.tensors if name in b.tensors and options.wants(name)]
    pairs = {name: (a.tensors[name], b.tensors[name]) for name in names}
    left = [name for name, pair in pairs.items() if has_weights(pair) and not can_round(pair)]
    if not left:
        return []
    return [
        f"the stored weights of {len(left)} masters, {left[0]} the first, were not compared: how a master is "
        "rounded to their element type is not known"
    ]


def _may_want(name: str, options: DiffOptions) -> bool:
    """Whether the object, or a field of it that a glob names with dots, is to be compared."""
    inner = any(glob.startswith(f"{name}.") for glob in options.keys)
    return inner or options.wants(name)


@dataclass(slots=True)
class KindSummary:
    """Tensors of one role: how many are equal, differ, or stand on one side only; the largest differences."""

    role: Role
    tensors: int = 0
    equal: int = 0
    different: int = 0
    only_a: int = 0
    only_b: int = 0
    elements: int = 0
    different_elements: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int = 0
    nan_mismatches: int = 0


def summarize(tensors: Sequence[TensorDiff]) -> list[KindSummary]:
    """One summary a role, in order of first use."""
    kinds: dict[str, KindSummary] = {}
    for tensor in tensors:
        kind = kinds.setdefault(tensor.role, KindSummary(tensor.role))
        kind.tensors += 1
        kind.equal += tensor.kind == "equal"
        kind.only_a += tensor.kind == "only in A"
        kind.only_b += tensor.kind == "only in B"
        kind.different += tensor.kind in ("values", "dtype", "shape")
        kind.elements += tensor.elements
        found = tensor.found
        kind.different_elements += found.different
        kind.max_abs = max(kind.max_abs, found.max_abs)
        kind.max_rel = max(kind.max_rel, found.max_rel)
        kind.max_ulp = max(kind.max_ulp, found.max_ulp or 0)
        kind.nan_mismatches += found.nan_mismatches
    return list(kinds.values())
