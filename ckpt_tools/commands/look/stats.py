"""`stats`: what the values of a checkpoint are like, by tensor, and by layer and role; what a training has changed.

One pass over the tensors, tile by tile; every sum is taken in float64. Two checkpoints are compared under the names
of parameters where both have them, so their formats, topologies and optimizer layouts need not be the same.
Where a reader makes a `Model` of the checkpoint, tensors are its values: one a parameter, layer, expert and role,
also where a file holds all layers in one tensor or an optimizer holds everything in flat buffers. Of other
checkpoints, and of those that no model can be made of, tensors are the stored ones under their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Generic

from ckpt_tools.close_names import unmatched_lines
from ckpt_tools.commands.check.diff import HUGGINGFACE, KEYS, PARAMETERS, DiffRequest, under_one_naming
from ckpt_tools.commands.huggingface.folder import CONFIG, read_config
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.read_model import READ, Wanted, read_model
from ckpt_tools.errors import NEVER_FINDINGS, CkptError, UsageError, raise_if
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.huggingface.quantization.quantized import SETTINGS, dequantized
from ckpt_tools.megatron.keys import Part, one_expert, part_of
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.model.choices import StatsBy
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import TargetTensor, target_of
from ckpt_tools.plain_data import plain
from ckpt_tools.verify.compare.differences import DiffOptions, Side
from ckpt_tools.verify.content.values import AnySums, Change, Statistics, measured
from ckpt_tools.verify.report import Meter


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One value of a parameter, or a stored tensor; `tensor` reads it."""

    name: str
    part: Part
    role: str
    tensor: TargetTensor
    expert: int | None = None
    keys: tuple[str, ...] = ()  # of the stored tensors that it is read from

    @property
    def title(self) -> str:
        """The name, with the expert's number."""
        return one_expert(self.name, self.expert)


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """All tensors of a checkpoint under one kind of name, layer by layer; `catalog` has what they are read from."""

    by: str
    catalog: Catalog
    tensors: tuple[NamedTensor, ...]
    notes: tuple[str, ...] = ()


def named_tensors(opened: Opened, by: str = "auto", workers: int | None = 1) -> NamedTensors:
    """The tensors by `parameters`, by `keys`, or by the first of them that the checkpoint can be read by.

    `workers` as those of `Wanted`.
    """
    kind = opened.location.kind
    if by == PARAMETERS and kind not in READ:
        raise UsageError(
            f"--by parameters: {opened.location.path} is {kind}, which names tensors by keys alone"
        )
    if by == KEYS or kind not in READ:
        return _by_keys(opened)
    try:
        model = read_model(opened, Wanted(unknown_keys=True, workers=workers))
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        if by == PARAMETERS:
            raise
        found = _by_keys(opened)
        first = str(error).partition("\n")[0]
        return replace(
            found, notes=(*found.notes, f"tensors are those that are stored, not parameters: {first}")
        )
    notes = (*model.notes, *([model.unread] if model.unread else []))
    return NamedTensors(PARAMETERS, model.catalog, in_layer_order(_values(model)), notes)


def in_layer_order(tensors: Iterable[NamedTensor]) -> tuple[NamedTensor, ...]:
    """Layer by layer, blocks and what is in a layer as they come first."""
    tensors = tuple(tensors)
    blocks = {block: i for i, block in enumerate(dict.fromkeys(t.part.block for t in tensors))}
    leaves = {leaf: i for i, leaf in enumerate(dict.fromkeys((t.part.block, t.part.leaf) for t in tensors))}

    def place(t: NamedTensor) -> tuple[int, int, int, int]:
        layer = -1 if t.part.layer is None else t.part.layer
        return (
            blocks[t.part.block],
            layer,
            leaves[t.part.block, t.part.leaf],
            -1 if t.expert is None else t.expert,
        )

    return tuple(sorted(tensors, key=place))


def _values(model: Model) -> Iterator[NamedTensor]:
    for parameter in model.parameters:
        part = part_of(parameter.name)
        for role, value in parameter.values.items():
            tensor = target_of(parameter.name, value)
            stored = [key for source in value.sources for key in model.catalog.stored_keys(source.key)]
            keys = tuple(dict.fromkeys(stored))
            yield NamedTensor(parameter.name, part, role, tensor, parameter.expert, keys)


def _by_keys(opened: Opened) -> NamedTensors:
    catalog, left_out, notes = _plain(opened)
    of = FORMATS[opened.location.kind]
    roles, parameters = of.roles(catalog), of.parameters(catalog)

    def named(key: str, entry: TensorEntry) -> NamedTensor:
        part, keys = part_of(parameters.get(key, key)), tuple(dict.fromkeys(catalog.stored_keys(key)))
        return NamedTensor(key, part, roles[key], target_of(key, entry.value), keys=keys)

    found = (named(key, entry) for key, entry in catalog.tensors.items() if key not in left_out)
    return NamedTensors(KEYS, catalog, in_layer_order(found), notes)


def _plain(opened: Opened) -> tuple[Catalog, frozenset[str], tuple[str, ...]]:
    """The catalog, with what a quantized Hugging Face model's codes and scales stand for in their place."""
    catalog, nothing = opened.catalog, frozenset[str]()
    if opened.location.kind != "safetensors" or not opened.files.exists(CONFIG):
        return catalog, nothing, ()
    try:
        config = read_config(opened.location.path)
        if SETTINGS not in config:
            return catalog, nothing, ()
        plain = dequantized(catalog, config, opened.files)
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        first = str(error).partition("\n")[0]
        return catalog, nothing, (f"codes and scales are shown as they are stored: {first}",)
    return plain.catalog, plain.parts, plain.notes


Progress = Callable[[int, int], None]


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
class Measured(Generic[AnySums]):
    """A tensor, and what its values are like or how they have moved from A to B."""

    named: NamedTensor
    found: AnySums


class _Sums(Generic[AnySums]):
    """The sums of all tensors, in the order of layers."""

    __slots__ = ()
    tensors: tuple[Measured[AnySums], ...]

    def layers(self) -> dict[tuple[str, str], AnySums]:
        """The sums of each (layer, role); layer "" is what is outside of layers."""
        return joined(((t.named.part.label, t.named.role), t.found) for t in self.tensors)

    def roles(self) -> dict[str, AnySums]:
        """The sums of each role."""
        return joined((t.named.role, t.found) for t in self.tensors)

    def _lists(self) -> dict[str, Any]:
        """Sums of roles, layers and tensors in JSON's types; infinities become text."""
        return {
            "roles": [{"role": role, **plain(sums.summary())} for role, sums in self.roles().items()],
            "layers": [
                {"layer": layer or None, "role": role, **plain(sums.summary())}
                for (layer, role), sums in self.layers().items()
            ],
            "tensors": [
                {
                    "name": t.named.name,
                    "expert": t.named.expert,
                    "layer": t.named.part.label or None,
                    "role": t.named.role,
                    "dtype": t.named.tensor.dtype,
                    "shape": list(t.named.tensor.shape),
                    "keys": list(t.named.keys),
                    **plain(t.found.summary()),
                }
                for t in self.tensors
            ],
        }


@dataclass(frozen=True, slots=True)
class CheckpointStatistics(_Sums[Statistics]):
    """What `stats` found in one checkpoint."""

    checkpoint: str
    kind: str
    by: str
    tensors: tuple[Measured[Statistics], ...]
    notes: tuple[str, ...] = ()
    chosen: bool = False  # only some tensors were asked for

    def nonfinite(self) -> list[Measured[Statistics]]:
        """The tensors that hold a NaN or an infinity."""
        return [t for t in self.tensors if not t.found.census.are_finite]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "checkpoint": self.checkpoint,
            "format": self.kind,
            "by": self.by,
            "sums": "float64",
            "notes": list(self.notes),
            **self._lists(),
        }


@dataclass(frozen=True, slots=True)
class CheckpointChange(_Sums[Change]):
    """What `stats` found between two checkpoints."""

    a: str
    b: str
    by: str
    tensors: tuple[Measured[Change], ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    reshaped: tuple[str, ...]  # have another shape in B, and are not compared
    notes: tuple[str, ...] = ()
    chosen: bool = False

    def nonfinite(self) -> list[Measured[Change]]:
        """The tensors that hold a NaN or an infinity in A or B; first those where the other has something else."""
        held = [t for t in self.tensors if t.found.left_out]
        return sorted(held, key=lambda t: not t.found.left_out_changed)

    def left_out(self) -> tuple[str, ...]:
        """A line on elements that the sums leave out, or none if they leave out nothing."""
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
            **self._lists(),
        }


def checkpoint_statistics(
    source: AnyPath, options: StatsOptions | None = None, progress: Progress = lambda _done, _total: None
) -> CheckpointStatistics:
    """What the values of the checkpoint at `source` are like; `progress` gets (bytes done, in all).

    Raises:
        UsageError: a glob or a role that matches nothing.
        Otherwise the errors of opening and reading checkpoints.
    """
    source = path_text(source)
    options = options or StatsOptions()
    with open_checkpoint(source, options.iteration, options.trust_pickle) as opened:
        named = named_tensors(opened, options.by, options.workers)
        chosen = _chosen(named.tensors, options)
        found = measured(
            lambda: Statistics(options.histogram),
            (opened.files, named.catalog, [t.tensor for t in chosen]),
            threads=options.threads,
            workers=options.workers,
            tick=_meter(progress, chosen),
        )
    pairs = zip(chosen, found, strict=True)
    return CheckpointStatistics(
        opened.location.path,
        opened.location.kind,
        named.by,
        tuple(Measured(*pair) for pair in pairs),
        named.notes,
        bool(options.keys or options.layers),
    )


def checkpoint_change(
    a: AnyPath,
    b: AnyPath,
    options: StatsOptions | None = None,
    progress: Progress = lambda _done, _total: None,
) -> CheckpointChange:
    """How the values at `a` have moved at `b`; `progress` gets (bytes done, in all).

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
        same_shape = [(x, y) for x, y in pairs if x.tensor.shape == y.tensor.shape]
        if not same_shape:
            raise UsageError(
                f"{first.location.path} and {second.location.path} have no tensor of one name, role and shape; "
                "`inspect --keys` shows what each is called"
            )
        found = measured(
            Change,
            (first.files, sides[0].catalog, [x.tensor for x, _ in same_shape]),
            (second.files, sides[1].catalog, [y.tensor for _, y in same_shape]),
            threads=options.threads,
            workers=options.workers,
            tick=_meter(progress, [t for pair in same_shape for t in pair]),
        )
    return CheckpointChange(
        first.location.path,
        second.location.path,
        sides[0].by,
        tuple(Measured(x, change) for (x, _), change in zip(same_shape, found, strict=True)),
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
        by, (first, second), notes, _ = under_one_naming(a, b, DiffRequest(), DiffOptions())
        role = WEIGHT if by == HUGGINGFACE else None
        return _named(first, tuple(notes), role), _named(second, tuple(notes), role)
    left, right = (named_tensors(side, options.by, options.workers) for side in (a, b))
    return (left, right) if left.by == right.by else (named_tensors(a, KEYS), named_tensors(b, KEYS))


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
    chosen = [
        t
        for t in tensors
        if (not options.keys or any(fnmatchcase(n, glob) for glob in options.keys for n in (t.name, *t.keys)))
        and (not options.layers or t.part.layer in options.layers)
        and (not options.roles or t.role in options.roles)
    ]
    if not wrong and not chosen:
        wrong = ["the checkpoint holds no tensor that is asked for"]
    raise_if(wrong, UsageError, "nothing to measure")
    return chosen


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


def joined(pairs: Iterable[tuple[Any, AnySums]]) -> dict[Any, AnySums]:
    """The sums under each name, in order of first use."""
    sums: dict[Any, AnySums] = {}
    for name, found in pairs:
        if name not in sums:
            sums[name] = found.empty()
        sums[name].join(found)
    return sums
