"""What of a checkpoint a mean is taken of, by the rules of its kind, and the tensors of the mean of several.

Where fp32 masters are stored beside the weights, the mean is taken of the masters, and a weight is the mean of its
masters rounded, as it is in every checkpoint that a job writes. Values that no optimizer updates (router biases,
counters, rotary frequencies) are states of a run and not averaged; a name tells them where there is no optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.commands.huggingface.hf_parts import CONFIG, read_config, refuse_adapters
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.read_model import shared_by
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, list_problems
from ckpt_tools.formats.storage.joined_files import joined_entry
from ckpt_tools.megatron.keys import parameter_of, stacked_axes
from ckpt_tools.megatron.torch_dist.optimizer_layouts.kinds import optimizer_layout
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import StateTensor
from ckpt_tools.model.catalog import Catalog, Made, TensorEntry, Value, made_entry
from ckpt_tools.model.dtypes import CASTABLE, FLOATING
from ckpt_tools.model.kernels.kernel import WeightedMean
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Insert, Place, Source

_BUFFER = re.compile(
    r"(?:^|\.)(?:expert_bias|e_score_correction_bias|local_tokens_per_expert|inv_freq|original_inv_freq|cos_cached|"
    r"sin_cached|running_mean|running_var|_extra_state)$"
)
_SEPARATE_MASTER = re.compile(
    r"(?:^|\.)(?:fp32_from_fp16_params|fp32_from_fp32_params|fp32_params?|master_params?|master_weights?|master|param)"
    r"(?:\.|$)"
)
_NAMED = 3  # keys that differ in the same way are named one by one
_CONVERT = "convert both to fsdp_dtensor and average those"
_ALONE = "leave the optimizer out of every checkpoint and average the weights alone"


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one checkpoint by what becomes of them; the rest are the last one's.

    `means` are averaged as they are stored. A key of `rounded` is a weight made of the means that its sources show.
    `kept` belong to the model and are the last one's, like everything else.
    """

    means: tuple[str, ...]
    kept: tuple[str, ...]
    rounded: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)

    @property
    def model(self) -> frozenset[str]:
        """All keys that every one of the checkpoints must have."""
        return frozenset((*self.means, *self.kept, *self.rounded))


def parts_of(opened: Opened, workers: int | None = 1) -> Parts:
    """What a mean with other checkpoints of this kind is taken of; `workers` as those of `Wanted`."""
    if opened.location.kind == "torch_dist":
        return _torch_dist(opened, workers)
    return _RULES[opened.location.kind](opened)


def _torch_dist(opened: Opened, workers: int | None) -> Parts:
    tensors = opened.catalog.tensors
    try:
        states = read_optimizer_states(opened.files, opened.catalog, opened.common, share=shared_by(workers))
    except UnsupportedCheckpointError as error:
        raise UnsupportedCheckpointError(f"{error}\nFor a mean: {_ALONE} (`strip`)") from error
    if states is not None and states.payloads:
        raise UnsupportedCheckpointError(
            f"{opened.location.path}: its masters stand inside objects ({states.layout}), which are not written "
            f"anew; {_CONVERT}, and convert the result back with --to torch_dist"
        )
    known = states.states if states is not None else {}
    weights = [key for key, role in opened.roles().items() if role == WEIGHT]
    rounded = {
        key: _shown(state, tensors[key], stacked_axes(key))
        for (kind, key), state in known.items()
        if kind == MASTER
    }
    masters = dict.fromkeys(source.key for sources in rounded.values() for source in sources)
    trained = {key for _, key in known}
    plain = [key for key in weights if key not in rounded]
    means, kept = _sorted_out(opened, plain, trained if known else None)
    _refuse_encoded(opened, [*masters, *rounded])
    return Parts((*masters, *means), kept, rounded)


def _shown(state: StateTensor, weight: TensorEntry, axes: int) -> tuple[Source, ...]:
    """The sources that tile a whole stored weight with its state."""
    if state.whole is not None:
        return (state.whole,)
    inserts = tuple(Insert(0) for _ in range(axes))
    rest = (0,) * (len(weight.shape) - axes)
    return tuple(
        Source(part.key, (*part.view, *inserts, Place((*lead, *rest), weight.shape)))
        for lead, parts in state.slices.items()
        for part in parts
    )


def _fsdp_dtensor(opened: Opened) -> Parts:
    found = {key: named for key in opened.catalog.tensors if (named := parameter_of(key))}
    beside = [key for key, (_, kind) in found.items() if kind in ("fp32_param", "param")]
    _refuse_masters(opened, beside)
    trained = {name for name, kind in found.values() if kind != WEIGHT}
    by_name = {name: key for key, (name, kind) in found.items() if kind == WEIGHT}
    keys = {by_name[name] for name in trained if name in by_name}
    means, kept = _sorted_out(opened, list(by_name.values()), keys if trained else None)
    return Parts(means, kept)


def _dcp(opened: Opened) -> Parts:
    roles = opened.roles()
    beside = [
        key
        for key, role in roles.items()
        if _SEPARATE_MASTER.search(key) and (role != WEIGHT or key.startswith(("master", "fp32_")))
    ]
    _refuse_masters(opened, beside)
    means, kept = _sorted_out(opened, [key for key, role in roles.items() if role == WEIGHT], None)
    return Parts(means, kept)


def _safetensors(opened: Opened) -> Parts:
    refuse_adapters(opened.catalog.tensors)
    if opened.files.exists(CONFIG) and read_config(opened.location.path).get("quantization_config"):
        raise UnsupportedCheckpointError(
            f"{opened.location.path}: config.json has a quantization_config, and the mean of quantized numbers is "
            "not the quantized mean. Average the models that were quantized, and quantize the result"
        )
    return Parts(*_sorted_out(opened, list(opened.catalog.tensors), None))


_RULES: Mapping[str, Callable[[Opened], Parts]] = {
    "fsdp_dtensor": _fsdp_dtensor,
    "dcp": _dcp,
    "safetensors": _safetensors,
}


def _sorted_out(
    opened: Opened, keys: Sequence[str], trained: set[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a model's tensors those that are averaged, and those that are not; `trained` None: nothing tells."""
    averaged = [key for key in keys if (not _BUFFER.search(key) if trained is None else key in trained)]
    tensors = opened.catalog.tensors
    numbers = [
        key for key in averaged if trained is not None or tensors[key].dtype in {*FLOATING, "complex64", "complex128"}
    ]  # fmt: skip
    _refuse_encoded(opened, numbers)
    means = frozenset(numbers)
    return tuple(numbers), tuple(key for key in keys if key not in means)


def _refuse_encoded(opened: Opened, keys: Sequence[str]) -> None:
    tensors = opened.catalog.tensors
    wrong = [f"{key} is {tensors[key].dtype}" for key in keys if tensors[key].dtype not in CASTABLE]
    if wrong:
        raise UnsupportedCheckpointError(
            f"{opened.location.path}: no mean is taken of numbers of these types, which stand for others or are not "
            f"ordered like them:\n{list_problems(wrong)}",
            wrong,
        )


def _refuse_masters(opened: Opened, keys: Sequence[str]) -> None:
    if keys:
        raise UnsupportedCheckpointError(
            f"{opened.location.path}: masters stand among the optimizer states, and nothing ties them to their "
            f"weights, which must stay their rounding; {_ALONE} "
            f"(`modify-state-dict CKPT OUT --op 'remove REGEX'`):\n{list_problems(keys)}",
            keys,
        )


def check_alike(parts: Sequence[Parts], opened: Sequence[Opened]) -> None:
    """Raise MappingError if keys, shapes, types or the order of buckets differ; all of them are named."""
    last, last_parts = opened[-1], parts[-1]
    found: dict[str, list[str]] = {}
    for other, its in zip(opened[:-1], parts[:-1], strict=True):
        for key, what in _differences(other, its, last, last_parts):
            found.setdefault(what, []).append(key)
    problems = list[str]()
    for what, keys in found.items():
        if len(keys) > _NAMED:
            problems.append(f"{len(keys):,} keys, such as {keys[0]}: each {what}")
        else:
            problems += [f"{key} {what}" for key in keys]
    if problems:
        raise MappingError(
            "a mean is taken of checkpoints with the same keys, shapes and types:\n"
            + list_problems(problems),
            problems,
        )


def _differences(one: Opened, its: Parts, last: Opened, last_parts: Parts) -> Iterator[tuple[str, str]]:
    """(key, in what the two checkpoints differ there)."""
    here, there = one.location.path, last.location.path
    layouts = [optimizer_layout(side.catalog, side.common) for side in (one, last)]
    if one.location.kind == "torch_dist" and layouts[0] != layouts[1] and its.model != last_parts.model:
        yield "the optimizer", f"is stored as {layouts[0]} in {here}, as {layouts[1]} in {there}: {_CONVERT}"
        return
    for key in sorted(last_parts.model ^ its.model):
        has, lacks = (there, here) if key in last_parts.model else (here, there)
        yield key, f"is in {has}, but not in {lacks}"
    averaged = [frozenset(parts.means) for parts in (its, last_parts)]
    for key in sorted(its.model & last_parts.model):
        a, b = one.catalog.tensors[key], last.catalog.tensors[key]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield key, f"is {a.dtype} {a.shape} in {here}, but {b.dtype} {b.shape} in {there}"
        elif (key in averaged[0]) != (key in averaged[1]):
            yield key, f"has optimizer states in one of {here} and {there} and none in the other"
        elif its.rounded.get(key) != last_parts.rounded.get(key):
            yield key, f"has its masters elsewhere in {here} than in {there}: {_CONVERT}"


def mean_targets(
    opened: Sequence[Opened], parts: Parts, weights: Sequence[float]
) -> tuple[Catalog, tuple[TargetTensor, ...]]:
    """The tensors of the mean, in the last checkpoint's order, and the catalog that holds what they are made of.

    The i-th of `weights` is the i-th checkpoint's; `check_alike` has passed.
    """
    last = opened[-1]
    tensors = {key: joined_entry(last.files, e, key) for key, e in last.catalog.tensors.items()}
    for key in parts.means:
        sources = []
        for one in opened:
            name = f"{key} of {one.location.path}"
            tensors[name] = joined_entry(one.files, one.catalog.tensors[key], name)
            sources.append(Source(name))
        entry = last.catalog.tensors[key]
        values = tuple(Value(entry.dtype, entry.shape, (source,)) for source in sources)
        mean = _mean_of(key)
        tensors[mean] = made_entry(mean, Made(WeightedMean(entry.dtype, tuple(weights)), values))
    shown: dict[str, tuple[Source, ...]] = {key: (Source(_mean_of(key)),) for key in parts.means}
    shown |= {
        key: tuple(Source(_mean_of(source.key), source.view) for source in sources)
        for key, sources in parts.rounded.items()
    }
    paths = last.catalog.planner_paths
    return Catalog(last.catalog.root, tensors, {}), tuple(
        TargetTensor(key, e.dtype, e.shape, shown.get(key, (Source(key),)), paths.get(key, ()))
        for key, e in last.catalog.tensors.items()
    )


def _mean_of(key: str) -> str:
    return f"mean of {key}"
