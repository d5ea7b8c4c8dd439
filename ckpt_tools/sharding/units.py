"""FSDP units, the order of parameters, and which rows tensor parallelism cuts: all derived from parameters' names.

Megatron-FSDP walks the module tree: the order is that of `named_parameters()`, and a unit is a transformer, MoE or
Mamba layer. A checkpoint has names only, so the tree is rebuilt from them with the order in which Megatron-Core's
modules register their children (core 0.16.1 and main).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import cache, lru_cache
from typing import TypeAlias

from ckpt_tools.errors import MappingError, UsageError, list_problems
from ckpt_tools.megatron.keys import OF_TRANSFORMERS, is_of_transformers
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.model.many import many
from ckpt_tools.sharding.parameters import Expert, Parameter, Part, Shape
from ckpt_tools.sharding.topology import Topology

# Modules that are units, and modules that have numbers in their names but are not units. `*` matches anything
# without a dot, `**.` any number of leading modules.
UNITS = (
    "**.decoder.layers.*",
    "**.encoder.layers.*",
    "**.mtp.layers.*.*_layer.layers.*",  # hybrid models: the layers of a whole stack
    "**.mtp.layers.*.*_layer",
)
ROOT = (
    *OF_TRANSFORMERS,  # whatever their layers are called
    *(f"**.mtp.layers.*.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
    "**.mtp.layers.*.*_layer.final_norm",
)

_REGISTERED = (
    ("language_model", "vision_model", "vision_projection"),
    ("embedding", "encoder", "decoder", "mtp", "output_layer"),
    ("word_embeddings", "position_embeddings", "tokentype_embeddings"),
    ("layers", "final_layernorm", "final_norm"),
    ("enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer", "final_layernorm"),
    ("input_layernorm", "self_attention", "pre_cross_attn_layernorm", "cross_attention", "pre_mlp_layernorm"),
    ("pre_mlp_layernorm", "mlp"),
    ("mixer", "norm"),  # Mamba layer
    ("core_attention", "linear_proj", "linear_qkv", "linear_q", "linear_kv", "q_layernorm", "k_layernorm"),
    ("linear_proj", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj"),
    ("linear_q_down_proj", "linear_qkv_down_proj", "linear_q_up_proj"),
    ("linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm"),
    ("router", "experts", "shared_experts"),
    ("linear_fc1", "linear_fc2"),
    ("in_proj", "conv1d", "norm", "out_norm", "out_proj"),
    ("layer_norm_weight", "layer_norm_bias", "weight", "bias"),  # parameters of one linear
    ("dt_bias", "A_log", "D"),
)


def _chain(orders: Iterable[Sequence[str]]) -> dict[str, int]:
    """A rank for every name that respects all `orders`: the length of the longest chain that leads to it."""
    orders = list(orders)
    rank = {name: 0 for order in orders for name in order}
    changed = True
    while changed:
        changed = False
        for order in orders:
            for before, after in itertools.pairwise(order):
                if rank[after] <= rank[before]:
                    rank[after], changed = rank[before] + 1, True
    return rank


_RANK = _chain(_REGISTERED)
_UNKNOWN = max(_RANK.values()) + 1
_NUMBERED = re.compile(r"([A-Za-z_]\w*?)(\d+)")


def model_order(names: Iterable[str]) -> list[str]:
    """`names` in the order of `named_parameters()`: a module's own parameters before its children's.

    Modules that are not Megatron-Core's keep the order in which `names` has them, after the known ones.
    """
    tree: _Tree = {}
    for name in names:
        node = tree
        for step in name.split("."):
            node = node.setdefault(step, {})
        node[""] = {}
    return list(_walk(tree, ""))


_Tree: TypeAlias = "dict[str, _Tree]"


def _walk(tree: _Tree, path: str) -> Iterator[str]:
    """Names below `path`; the empty step marks that `path` is a parameter itself."""
    for step, below in sorted(tree.items(), key=lambda entry: (set(entry[1]) != {""}, *_rank(entry[0]))):
        if "" in below:
            yield path + step
        yield from _walk({k: v for k, v in below.items() if k}, f"{path}{step}.")


@lru_cache(maxsize=4096)
def _rank(step: str) -> tuple[int, int]:
    """(rank among its siblings, number): layers and experts go by number, `weight10` after `weight9`."""
    if step.isdecimal():
        return _UNKNOWN, int(step)
    numbered = _NUMBERED.fullmatch(step)
    if numbered and step not in _RANK and numbered[1] in _RANK:
        return _RANK[numbered[1]], int(numbered[2])
    return _RANK.get(step, _UNKNOWN), -1


def number_units(names: Sequence[str], modules: Sequence[str], innermost: bool = False) -> list[int | None]:
    """For each name the position in `modules` of the unit that owns it, None for the root.

    v1 gives a parameter to the outermost module of the list that contains it, v2 to the innermost; so with v1 a
    nested unit owns nothing, yet has a number. `modules` are paths, parents before children.
    """
    number = {module: i for i, module in enumerate(modules)}

    @cache
    def owner(module: str) -> int | None:
        steps = module.split(".")
        containing = (".".join(steps[: n + 1]) for n in range(len(steps)))
        found = [number[path] for path in containing if path in number]
        return None if not found else found[-1 if innermost else 0]

    return [owner(name.rpartition(".")[0]) for name in names]


def find_units(
    names: Sequence[str], units: Sequence[str] = UNITS, root: Sequence[str] | None = ROOT
) -> list[str]:
    """Paths of the unit modules that `names` lie in, in order of first appearance.

    Without `root`, `units` are all that there are.
    """
    inside, outside = [_pattern(glob) for glob in units], [_pattern(glob) for glob in root or ()]

    @cache
    def unit_of(path: str) -> str | None:
        """The unit that a module is or lies in, "" for the root, None where no pattern says; paths end in a dot."""
        if any(pattern.match(path) for pattern in outside):
            return ""
        return next((match[1] for pattern in inside if (match := pattern.match(path))), None)

    modules: dict[str, None] = {}
    lost = []
    for name in names:
        unit = unit_of(name[: name.rfind(".") + 1])  # one module may hold hundreds of experts
        if unit:
            modules.setdefault(unit)
        elif unit is None and any(step.isdecimal() for step in name.split(".")):
            lost.append(name)
    if root is None and not modules:
        raise UsageError(f"--units {', '.join(units)}: no module of the model has such a path")
    if lost and root is not None:
        raise UsageError(
            "these tensors have no place in any FSDP unit:\n"
            f"{list_problems(lost)}\n"
            f"Units are {', '.join(units)}; name those of the model with --units",
            lost,
        )
    return list(modules)


def _pattern(glob: str) -> re.Pattern[str]:
    """A regular expression with the module path as group 1; at least the parameter's own name follows."""
    text = re.escape(glob).replace(r"\*\*\.", r"(?:[^.]+\.)*?").replace(r"\*", r"[^.]*")
    return re.compile(rf"({text})\.")


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
    """The dimension that tensor parallelism cuts, None for none, `_NO_RULE` if unknown.

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
