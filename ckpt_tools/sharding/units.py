"""FSDP units and the order of parameters, derived from the parameters' names.

Megatron-FSDP walks the module tree: the order is that of `named_parameters()`, and a unit is a transformer, MoE or
Mamba layer. A checkpoint has names only, so the tree is rebuilt from them with the order in which Megatron-Core's
modules register their children (core 0.16.1 and main).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import TypeAlias

from ckpt_tools.errors import UsageError, list_problems
from ckpt_tools.megatron.keys import OF_TRANSFORMERS

# Modules that are units, and modules that have numbers in their names but are not units. `*` stands for anything
# without a dot, `**.` for any number of leading modules.
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
    """A regular expression whose group 1 is the module path, below which at least the parameter's own name stands."""
    text = re.escape(glob).replace(r"\*\*\.", r"(?:[^.]+\.)*?").replace(r"\*", r"[^.]*")
    return re.compile(rf"({text})\.")
