"""`stats`: what the values of a checkpoint are like, by tensor, and by layer and role; what a training has changed.

One pass over the tensors, tile by tile; every sum is taken in float64. Two checkpoints are compared under the names
of parameters where both have them, so their formats, topologies and optimizer layouts need not be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeVar

from ckpt_tools.close_names import unmatched_lines
from ckpt_tools.commands.check.sides import by_export, by_keys, holds_megatron, under_one_spelling
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.look.named_tensors import (
    KEYS,
    NamedTensor,
    NamedTensors,
    in_layer_order,
    named_tensors,
)
from ckpt_tools.commands.look.read_values import json_value
from ckpt_tools.errors import UsageError, list_problems
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.megatron.keys import part_of
from ckpt_tools.model.choices import StatsBy
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.verify.compare.differences import Side
from ckpt_tools.verify.content.measure import Place, changes, statistics
from ckpt_tools.verify.content.values import Change, Statistics
from ckpt_tools.verify.report import Meter

Progress = Callable[[int, int], None]
AnySums = TypeVar("AnySums", Statistics, Change)


@dataclass(frozen=True, slots=True)
class StatsOptions:
    """Which tensors are measured, under which names, and how."""

    keys: tuple[str, ...] = ()  # globs on names and stored keys; () for all
    roles: tuple[str, ...] = ()  # () for all
    layers: tuple[int, ...] = ()  # numbers in every block; () for all
    by: StatsBy = "auto"
    iteration: int | None = None
    histogram: bool = False  # count elements by their size
    threads: int = 2
    workers: int | None = None  # processes; None: as many as help
    trust_pickle: bool = False


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """One tensor and what its values are like."""

    named: NamedTensor
    found: Statistics


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """What `stats` found in one checkpoint, layer by layer."""

    checkpoint: str
    kind: str
    by: str
    tensors: tuple[TensorStatistics, ...]
    notes: tuple[str, ...] = ()
    chosen: bool = False  # only some tensors were asked for

    def layers(self) -> dict[tuple[str, str], Statistics]:
        """The sums of each (layer, role); layer "" is what stands outside of layers."""
        return _joined(((t.named.part.label, t.named.role), t.found) for t in self.tensors)

    def roles(self) -> dict[str, Statistics]:
        """The sums of each role."""
        return _joined((t.named.role, t.found) for t in self.tensors)

    def sick(self) -> Iterator[TensorStatistics]:
        """The tensors that hold a NaN or an infinity."""
        return (t for t in self.tensors if t.found.census.nans or t.found.census.infinities)

    def as_json(self) -> dict[str, Any]:
        """In JSON's types; infinities become text."""
        return {
            "schema_version": 1,
            "checkpoint": self.checkpoint,
            "format": self.kind,
            "by": self.by,
            "sums": "float64",
            "notes": list(self.notes),
            "roles": [{"role": role, **_numbers(f)} for role, f in self.roles().items()],
            "layers": [
                {"layer": layer or None, "role": role, **_numbers(found)}
                for (layer, role), found in self.layers().items()
            ],
            "tensors": [{**_described(t.named), **_numbers(t.found)} for t in self.tensors],
        }


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor of two checkpoints and how it has moved from the first to the second."""

    named: NamedTensor
    found: Change


@dataclass(frozen=True, slots=True)
class CheckpointChange:
    """What `stats` found between two checkpoints."""

    a: str
    b: str
    by: str
    tensors: tuple[TensorChange, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    reshaped: tuple[str, ...]  # have another shape in B, and are not compared
    notes: tuple[str, ...] = ()
    chosen: bool = False

    def layers(self) -> dict[tuple[str, str], Change]:
        """The sums of each (layer, role)."""
        return _joined(((t.named.part.label, t.named.role), t.found) for t in self.tensors)

    def roles(self) -> dict[str, Change]:
        """The sums of each role."""
        return _joined((t.named.role, t.found) for t in self.tensors)

    def sick(self) -> Iterator[TensorChange]:
        """The tensors that hold a NaN or an infinity in A or B; first those where the other has something else."""
        held = [t for t in self.tensors if t.found.left_out]
        return iter(sorted(held, key=lambda t: not t.found.left_out_changed))

    def left_out(self) -> tuple[str, ...]:
        """A line on what the sums do not tell, or none where they tell all."""
        elements = sum(t.found.elements for t in self.tensors)
        count = sum(t.found.left_out for t in self.tensors)
        changed = sum(t.found.left_out_changed for t in self.tensors)
        if not count:
            return ()
        return (
            f"NaN or infinite in A or B: {count:,} of {elements:,} elements, left out of relative changes, cosines "
            f"and largest |B - A|; of these differ, and count as changed: {changed:,}",
        )

    def as_json(self) -> dict[str, Any]:
        """In JSON's types; infinities become text."""
        return {
            "schema_version": 2,
            "a": self.a,
            "b": self.b,
            "by": self.by,
            "sums": "float64",
            "notes": [*self.left_out(), *self.notes],
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "reshaped": list(self.reshaped),
            "roles": [{"role": role, **_numbers(f)} for role, f in self.roles().items()],
            "layers": [
                {"layer": layer or None, "role": role, **_numbers(found)}
                for (layer, role), found in self.layers().items()
            ],
            "tensors": [{**_described(t.named), **_numbers(t.found)} for t in self.tensors],
        }


def checkpoint_statistics(
    source: AnyPath, options: StatsOptions | None = None, progress: Progress = lambda _done, _total: None
) -> CheckpointStatistics:
    """What the values of the checkpoint at `source` are like; `progress` is told (bytes done, in all).

    Raises:
        UsageError: a glob or a role that matches nothing.
        Otherwise the errors of opening and reading checkpoints.
    """
    source = path_text(source)
    options = options or StatsOptions()
    with open_checkpoint(source, options.iteration, options.trust_pickle) as opened:
        named = named_tensors(opened, options.by, options.workers)
        chosen = _chosen(named.tensors, options)
        found = statistics(
            Place(opened.files, named.catalog),
            [t.tensor for t in chosen],
            histogram=options.histogram,
            threads=options.threads,
            workers=options.workers,
            tick=_meter(progress, chosen),
        )
    pairs = zip(chosen, found, strict=True)
    return CheckpointStatistics(
        opened.location.path,
        opened.location.kind,
        named.by,
        tuple(TensorStatistics(*pair) for pair in pairs),
        named.notes,
        bool(options.keys or options.layers),
    )


def checkpoint_change(
    a: AnyPath,
    b: AnyPath,
    options: StatsOptions | None = None,
    progress: Progress = lambda _done, _total: None,
) -> CheckpointChange:
    """How the values at `a` have moved at `b`; `progress` is told (bytes done, in all).

    Raises:
        UsageError: a glob or a role that matches nothing, or checkpoints without a name in common.
        Otherwise the errors of opening and reading checkpoints.
    """
    a, b = path_text(a), path_text(b)
    options = options or StatsOptions()
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(open_checkpoint(path, options.iteration, options.trust_pickle))
            for path in (a, b)
        )
        sides = _under_one_kind_of_name(first, second, options)
        chosen = _paired(*sides)
        wanted = _chosen(in_layer_order({**chosen[1], **chosen[0]}.values()), options)
        both = [t for t in wanted if all(_identity(t) in side for side in chosen)]
        pairs = [(t, chosen[1][_identity(t)]) for t in both]
        alike = [(x, y) for x, y in pairs if x.tensor.shape == y.tensor.shape]
        if not alike:
            raise UsageError(
                f"{first.location.path} and {second.location.path} have no tensor of one name, role and shape; "
                "`inspect --keys` shows what each is called"
            )
        found = changes(
            (Place(first.files, sides[0].catalog), Place(second.files, sides[1].catalog)),
            [(x.tensor, y.tensor) for x, y in alike],
            threads=options.threads,
            workers=options.workers,
            tick=_meter(progress, [t for pair in alike for t in pair]),
        )
    return CheckpointChange(
        first.location.path,
        second.location.path,
        sides[0].by,
        tuple(TensorChange(x, change) for (x, _), change in zip(alike, found, strict=True)),
        _absent(wanted, chosen[0], chosen[1]),
        _absent(wanted, chosen[1], chosen[0]),
        tuple(_spoken(x) for x, y in pairs if x.tensor.shape != y.tensor.shape),
        tuple(dict.fromkeys((*sides[0].notes, *sides[1].notes))),
        bool(options.keys or options.layers),
    )


def _under_one_kind_of_name(a: Opened, b: Opened, options: StatsOptions) -> tuple[NamedTensors, NamedTensors]:
    """Both by parameters, by keys, or a Megatron checkpoint as its export to the other, a Hugging Face model."""
    kinds = {a.location.kind, b.location.kind}
    if options.by == "auto" and "safetensors" in kinds and len(kinds) == 2:
        if holds_megatron(a) and holds_megatron(b):
            sides, notes = by_export(a, b)
            role = WEIGHT
        else:
            sides, notes = under_one_spelling((by_keys(a), by_keys(b)))
            role = None
        return _named(sides[0], tuple(notes), role), _named(sides[1], tuple(notes), role)
    first, second = (named_tensors(side, options.by, options.workers) for side in (a, b))
    if first.by != second.by:
        first, second = named_tensors(a, KEYS), named_tensors(b, KEYS)
    return first, second


_Side = dict[tuple[str, int | None, str], NamedTensor]


def _paired(a: NamedTensors, b: NamedTensors) -> tuple[_Side, _Side]:
    """Both sides' tensors by name, expert and role, without weights that have their master for company on one side
    and for a stand-in on the other; where one side has weights alone and the other masters, those are a pair.
    """
    sides: tuple[_Side, _Side] = ({_identity(t): t for t in a.tensors}, {_identity(t): t for t in b.tensors})
    for here, there in (sides, sides[::-1]):
        for name, expert, role in list(here):
            weight, master = (name, expert, WEIGHT), (name, expert, MASTER)
            if role != WEIGHT or weight in there or master not in there:
                continue
            if master in here:
                del here[weight]
            else:
                there[weight] = replace(there.pop(master), role=WEIGHT)
    return sides


def _named(side: Side, notes: tuple[str, ...], role: str | None) -> NamedTensors:
    tensors = (
        NamedTensor(name, part_of(name), role or tensor.role, tensor)
        for name, tensor in side.tensors.items()
        if isinstance(tensor, TargetTensor)
    )
    return NamedTensors("huggingface", side.catalog, in_layer_order(tensors), notes)


def _chosen(tensors: Sequence[NamedTensor], options: StatsOptions) -> list[NamedTensor]:
    """The tensors that are asked for."""
    names = dict.fromkeys(name for t in tensors for name in (t.name, *t.keys))
    wrong = unmatched_lines("--keys", options.keys, names)
    roles = dict.fromkeys(t.role for t in tensors)
    wrong += [
        f"--role {role!r}: the checkpoint has {', '.join(roles)}"
        for role in options.roles
        if role not in roles
    ]
    numbers = dict.fromkeys(t.part.layer for t in tensors if t.part.layer is not None)
    wrong += [
        f"--layer {number}: the checkpoint has {', '.join(map(str, numbers)) or 'no layers'}"
        for number in options.layers
        if number not in numbers
    ]
    found = [t for t in tensors if _is_chosen(t, options)]
    if not wrong and not found:
        wrong = ["the checkpoint holds no tensor that is asked for"]
    if wrong:
        raise UsageError(f"nothing to measure:\n{list_problems(wrong)}", wrong)
    return found


def _is_chosen(tensor: NamedTensor, options: StatsOptions) -> bool:
    names = (tensor.name, *tensor.keys)
    by_name = not options.keys or any(fnmatchcase(name, glob) for glob in options.keys for name in names)
    by_layer = not options.layers or tensor.part.layer in options.layers
    return by_name and by_layer and (not options.roles or tensor.role in options.roles)


def _meter(progress: Progress, tensors: Iterable[NamedTensor]) -> Meter:
    meter = Meter(progress)
    meter.total = sum(prod(t.tensor.shape) * itemsize(t.tensor.dtype) for t in tensors)
    return meter


def _identity(tensor: NamedTensor) -> tuple[str, int | None, str]:
    return tensor.name, tensor.expert, tensor.role


def _spoken(tensor: NamedTensor) -> str:
    return f"{tensor.title}, {tensor.role}"


def _absent(
    wanted: Iterable[NamedTensor], here: dict[Any, NamedTensor], there: dict[Any, NamedTensor]
) -> tuple[str, ...]:
    return tuple(_spoken(t) for t in wanted if _identity(t) in here and _identity(t) not in there)


def _joined(pairs: Iterable[tuple[Any, AnySums]]) -> dict[Any, AnySums]:
    """The sums under each name, in order of first use."""
    sums: dict[Any, AnySums] = {}
    for name, found in pairs:
        if name not in sums:
            sums[name] = found.empty()
        sums[name].join(found)
    return sums


def _described(named: NamedTensor) -> dict[str, Any]:
    return {
        "name": named.name,
        "expert": named.expert,
        "layer": named.part.label or None,
        "role": named.role,
        "dtype": named.tensor.dtype,
        "shape": list(named.tensor.shape),
        "keys": list(named.keys),
    }


def _numbers(found: Statistics | Change) -> dict[str, Any]:
    numbers: dict[str, Any] = json_value(found.summary())
    if isinstance(found, Statistics) and found.exponents is not None:
        numbers["histogram"] = [list(pair) for pair in found.histogram()]
    return numbers
