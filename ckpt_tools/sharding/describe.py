"""From names and shapes of a Megatron-Core model's live tensors to `Parameter`s: tensor and expert parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from functools import lru_cache

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.keys import is_of_transformers
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.model.many import many
from ckpt_tools.sharding.parameters import Expert, Parameter, Part, Shape
from ckpt_tools.sharding.topology import Topology
from ckpt_tools.sharding.units import ROOT, UNITS, find_units, model_order, number_units

_EXPERT = re.compile(
    r"(?P<experts>.*\.experts\.)(?:local_experts\.(?P<module>\d+)\..+|.+\.(?:weight|bias)(?P<leaf>\d+))"
)
_COLUMN = (
    r"word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_fc1|linear_q_proj|linear_q_up_proj"
    r"|linear_kv_up_proj|eh_proj|in_proj|conv1d"
)


def _ending(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?:.*\.)?(?:{text})")


# The first rule that matches the end of a name tells the dimension that tensor parallelism cuts.
_TP_DIMS: tuple[tuple[re.Pattern[str], int | None], ...] = (
    (_ending(rf"(?:{_COLUMN})\.(?:weight|bias)\d*"), 0),
    (_ending(r"(?:linear_proj|linear_fc2|out_proj)\.weight\d*"), 1),
    (_ending(r"(?:linear_proj|linear_fc2|out_proj)\.bias\d*"), None),
    (_ending(r"mixer\.norm\.weight|softmax_offset|conv1d_(?:weight|bias)|A_log|D|dt_bias"), 0),
    (_ending(r"\w*norm\w*\.(?:weight|bias)|layer_norm_(?:weight|bias)"), None),
    (_ending(r"router\.\w+|gate_weight|(?:position|tokentype)_embeddings\.weight"), None),
    (_ending(r"multi_modal_projector\.proj\.weight"), 0),
    (_ending(r"conv1\.weight|ln_(?:pre|post)\.(?:weight|bias)|class_token"), None),  # vision tower
)
_NO_RULE = -1


@many(frozen=True, slots=True)
class LiveTensor:
    """A tensor of the running model under its own name with its global shape (elements).

    `parts` names the checkpoint tensors that hold it, if they are several; a `gated` one's are its two halves,
    `_w` and `_v`.
    """

    name: str
    shape: Shape
    dtype: str
    gated: bool = False
    parts: tuple[Part, ...] = ()
    buffer: bool = False
    trainable: bool = True


def describe(
    tensors: Iterable[LiveTensor],
    topology: Topology,
    units: Sequence[str] = UNITS,
    root: Sequence[str] | None = ROOT,
    tp_dims: Mapping[str, int | None] | None = None,
    layout: LayoutName = "mfsdp-v1",
) -> list[Parameter]:
    """Parameters for `Placement`, in the model's order.

    `units` and `root` are patterns of module paths (see `units`); without `root`, what is in no unit is the root's.
    `tp_dims` maps shell patterns of names to the dimension that tensor parallelism cuts, and is asked before the
    built-in rules. What `layout` does not depend on is not asked for: units with `fsdp2`, and nothing with `even`.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    names = model_order(list(by_name))
    # Megatron's adapter names no unit classes if it shards nothing.
    has_units = layout.startswith("mfsdp") and topology.strategy != "no_shard"
    modules = find_units(names, units, root) if has_units else []
    experts = _experts(names) if layout != "even" else {}
    given = [(re.compile(translate(glob)), dim) for glob, dim in (tp_dims or {}).items()]
    dims = {name: _tp_dim(name, given) for name in names}
    unknown = [
        name
        for name in names
        if dims[name] == _NO_RULE
        and layout != "even"
        and (topology.etp if name in experts else topology.tp) > 1
    ]
    if unknown:
        raise MappingError(
            "which dimension tensor parallelism cuts is not known for:\n"
            f"{list_problems(unknown)}\nGive the dimension of each, or use tp 1",
            unknown,
        )
    return [
        Parameter(
            name,
            tensor.shape,
            tensor.dtype,
            tp_dim=None if dims[name] == _NO_RULE or tensor.buffer else dims[name],
            is_expert=".experts." in name,
            expert=experts.get(name),
            unit=unit,
            trainable=tensor.trainable,
            buffer=tensor.buffer,
            parts=_halves(tensor) if tensor.gated else tensor.parts,
        )
        for name, unit in zip(names, number_units(names, modules), strict=True)
        for tensor in (by_name[name],)
    ]


def _tp_dim(name: str, given: Iterable[tuple[re.Pattern[str], int | None]]) -> int | None:
    """The dimension that tensor parallelism cuts, None for none, `_NO_RULE` if nothing tells.

    MLA's down-projections are whole on every rank with the TE layer spec and cut by rows with the local one.
    """
    for pattern, dim in given:
        if pattern.match(name):
            return dim
    if is_of_transformers(name):
        return None
    return _ruled_dim(".".join(name.split(".")[-3:]))


@lru_cache(maxsize=4096)
def _ruled_dim(ending: str) -> int | None:
    return next((dim for rule, dim in _TP_DIMS if rule.fullmatch(ending)), _NO_RULE)


def _experts(names: Iterable[str]) -> dict[str, Expert]:
    numbers = {}
    seen: dict[str, set[int]] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match:
            numbers[name] = match["experts"], int(match["module"] or match["leaf"])
            seen.setdefault(match["experts"], set()).add(numbers[name][1])
    problems = [
        f"{experts}*: {len(found)} experts, the highest number is {max(found)}"
        for experts, found in seen.items()
        if max(found) + 1 != len(found)
    ]
    if problems:
        raise MappingError("experts are missing:\n" + list_problems(problems), problems)
    return {name: Expert(number, len(seen[experts])) for name, (experts, number) in numbers.items()}


def _halves(tensor: LiveTensor) -> tuple[Part, ...]:
    rows, odd = divmod(tensor.shape[0], 2)
    if odd:
        raise MappingError(f"{tensor.name}: {tensor.shape[0]} rows cannot be two equal halves")
    return Part(f"{tensor.name}_w", rows), Part(f"{tensor.name}_v", rows)
