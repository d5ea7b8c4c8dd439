"""Which keys of a plain PyTorch checkpoint are what: nothing but the nesting of dicts, which DCP writes down, tells.

Models and optimizers give their state dicts names, and a program puts both under names of its own::

    model.<name>, <name>, app.model.<name>               the weights: torchtitan's flat ones stand at the top
    optimizer.state.<name>.exp_avg                       `get_optimizer_state_dict`: by name
    optimizer.param_groups.0.lr, .params                   its groups hold the names of their parameters
    optimizer.state.<name>.exp_avg                       the same with `flatten_optimizer_state_dict`
    optimizer.param_groups.<name>.lr                       every parameter has its group's fields
    optimizer.state.7.exp_avg                            `optimizer.state_dict()`: by number, through all groups
    optimizer.optimizer.state.7.exp_avg                  Megatron's `torch_dcp`: so too, and the masters beside it
    optimizer.fp32_from_fp16_params.0.7                    by group and place in it

What is neither weight nor state (rng states, data loaders, schedulers) travels unread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ckpt_tools.megatron.keys import canonical_kind, state_role
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.roles import MASTER, WEIGHT, Role

Form: TypeAlias = Literal["flattened", "by_name", "by_number"]
"""How an optimizer's states name their parameters."""

_PARTS = ("state", "param_groups")
_MASTERS = "fp32_from_fp16_params"
EXTRA_STATE = "_extra_state"
_DIGITS = 9
_DEEPEST = (
    64  # names within names that are looked at: no module nests so, but a hostile key has a million dots
)
_MEGATRON = re.compile(
    r"(?:.*\.)?(?:(?:decoder|encoder)\.layers\.\d+\.(?:self_attention|mlp|mixer)|embedding\.word_embeddings)\..+"
)


class _Leaf(NamedTuple):
    """A key inside an optimizer's state dict: `steps` are what stands behind `state` or `param_groups`."""

    key: str
    root: str
    part: str
    steps: tuple[str, ...]
    flat: bool  # state or param_groups are no dict of their own: the steps are one dotted name


@dataclass(frozen=True, slots=True)
class OptimizerKeys:
    """One optimizer's states and the fields of its groups: owner -> kind or field -> key.

    Owners are names, or decimal numbers: of parameters where states are `by_number`, of groups unless `flattened`.
    """

    root: str
    form: Form
    states: Mapping[str, Mapping[str, str]]
    groups: Mapping[str, Mapping[str, str]]
    masters: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (group, place in it) -> key

    def all_keys(self) -> Iterator[str]:
        """All its keys."""
        yield from self.masters.values()
        for owned in (*self.states.values(), *self.groups.values()):
            yield from owned.values()


@dataclass(frozen=True, slots=True)
class StateDict:
    """A checkpoint's keys, sorted; `model` is what stands in front of every weight's name."""

    model: str
    weights: Mapping[str, str]  # name -> key
    optimizers: tuple[OptimizerKeys, ...]
    others: tuple[str, ...]

    def roles(self) -> dict[str, Role]:
        """What every tensor of the model and its optimizers is, by key."""
        found: dict[str, Role] = dict.fromkeys(self.weights.values(), WEIGHT)
        for optimizer in self.optimizers:
            found |= dict.fromkeys(optimizer.masters.values(), MASTER)
            for kinds in optimizer.states.values():
                found |= {key: state_role(kind.rpartition(".")[2]) for kind, key in kinds.items()}
        return found

    @property
    def layout(self) -> str:
        """The optimizer's layout, for reports."""
        forms = {f"state_dict_{optimizer.form}" for optimizer in self.optimizers}
        return "none" if not forms else forms.pop() if len(forms) == 1 else "state_dict_mixed"


def is_megatron(found: StateDict) -> bool:
    """Whether the weights have the names of Megatron-Core's modules."""
    return any(map(_MEGATRON.fullmatch, found.weights))


def is_group_map(catalog: Catalog) -> bool:
    """Whether the keys are those of a dump of parameter groups: a number for every parameter, and no tensor."""
    return (
        not catalog.tensors
        and bool(catalog.objects)
        and all(k.startswith("module.") for k in catalog.objects)
    )


def read_state_dict(catalog: Catalog) -> StateDict:
    """The keys of a plain PyTorch checkpoint, sorted: once for a catalog, since a large one takes seconds."""
    found: StateDict | None = catalog.derived.get("state_dict")
    if found is None:
        found = catalog.derived["state_dict"] = _read(catalog)
    return found


def _read(catalog: Catalog) -> StateDict:
    keys = (*catalog.tensors, *catalog.objects)
    leaves = _optimizer_leaves(catalog, keys)
    roots: dict[str, list[_Leaf]] = {}
    for leaf in leaves:
        roots.setdefault(leaf.root, []).append(leaf)
    masters = _masters(catalog, roots)
    inside = {leaf.key for leaf in leaves} | {key for found in masters.values() for key in found.values()}
    outside = [key for key in catalog.tensors if key not in inside and not key.endswith(EXTRA_STATE)]
    weights, model = _weights(catalog, outside, [leaf for leaf in leaves if leaf.part == "state"])
    optimizers = tuple(_optimizer(root, inner, weights, masters[root]) for root, inner in roots.items())
    used = inside | set(weights.values())
    return StateDict(model, weights, optimizers, tuple(key for key in keys if key not in used))


def _optimizer_leaves(catalog: Catalog, keys: Iterable[str]) -> list[_Leaf]:
    """The keys of optimizers: a module may be called `state` too, but it has no groups."""
    leaves = [leaf for key in keys if (leaf := _leaf(catalog, key))]
    grouped = {leaf.root for leaf in leaves if leaf.part == "param_groups"}
    return [leaf for leaf in leaves if leaf.root in grouped or "optim" in leaf.root]


def _leaf(catalog: Catalog, key: str) -> _Leaf | None:
    """What a key of an optimizer's state dict names; None for other keys."""
    path = catalog.planner_paths.get(key)
    if path is None:
        return _untold(key)
    steps = [str(step) for step in path]
    for at, step in enumerate(steps[:_DEEPEST]):
        part, _, rest = step.partition(".")
        if part not in _PARTS:
            continue
        root = "".join(f"{outer}." for outer in steps[:at])
        if not rest and at + 2 < len(steps):
            return _Leaf(key, root, part, tuple(steps[at + 1 :]), False)
        if rest and at + 1 == len(steps):
            return _Leaf(key, root, part, (rest,), True)
    return None


def _untold(key: str) -> _Leaf | None:
    """The same without planner data, when dots do not tell where a name begins: an optimizer's dict is called so."""
    steps = key.split(".", _DEEPEST)
    for at, step in enumerate(steps[1:-1], 1):
        if step in _PARTS and "optim" in steps[at - 1]:
            root = "".join(f"{outer}." for outer in steps[:at])
            return _Leaf(key, root, step, (key[len(root) + len(step) + 1 :],), True)
    return None


def _masters(catalog: Catalog, roots: Iterable[str]) -> dict[str, dict[tuple[int, int], str]]:
    """Masters that Megatron's 16-bit optimizer keeps beside its inner one, by the root of that."""
    found: dict[str, dict[tuple[int, int], str]] = {}
    for key in catalog.tensors:
        head, name, place = key.partition(f"{_MASTERS}.")
        group, _, number = place.partition(".")
        if name and is_number(group) and is_number(number):
            found.setdefault(head, {})[int(group), int(number)] = key
    return {root: found.get(root.removesuffix("optimizer."), {}) for root in roots}


def is_number(text: str) -> bool:
    """Whether it is a number that a parameter or a group can have."""
    return len(text) <= _DIGITS and text.isascii() and text.isdigit()


def _weights(catalog: Catalog, tensors: Iterable[str], states: Iterable[_Leaf]) -> tuple[dict[str, str], str]:
    """The weights by name, and what stands in front of the names.

    Names of optimizer states tell it; where there are none, the dict that is called `model`, else the outermost.
    """
    roots = {key: _root(catalog, key) for key in tensors}
    root = _root_of_states(roots, states)
    if root is None:
        held = Counter(roots.values())
        named = [r for r in held if r.split(".")[-2:-1] == ["model"]]
        root = named[0] if named else "" if "" in held or not held else held.most_common(1)[0][0]
    inside = (key for key, of in roots.items() if key.startswith(root) and root.startswith(of))
    return {key.removeprefix(root): key for key in inside}, root


def _root(catalog: Catalog, key: str) -> str:
    """The names of the dicts that a tensor stands in, with their dots."""
    path = catalog.planner_paths.get(key)
    if path is None:
        return "model." if key.startswith("model.") else ""
    return "".join(f"{step}." for step in path[:-1])


def _root_of_states(roots: Mapping[str, str], states: Iterable[_Leaf]) -> str | None:
    """What stands in front of the weights' names, where the states of an optimizer repeat these."""
    owners = {owner for leaf in states if (owner := _owner(leaf)) and not is_number(owner)}
    if not owners:
        return None
    votes: Counter[str] = Counter()
    for key in roots:
        votes.update({key[: len(key) - len(name)] for name in endings(key) if name in owners})
    return max(votes, key=lambda root: (votes[root], -len(root))) if votes else None


def _owner(leaf: _Leaf) -> str:
    """The name in front of a state's kind, as long as nobody knows better."""
    return leaf.steps[0] if not leaf.flat else leaf.steps[0].rpartition(".")[0]


def endings(key: str) -> Iterator[str]:
    """The key, and what is left of it behind each of its first dots."""
    for _ in range(_DEEPEST):
        yield key
        _, dot, key = key.partition(".")
        if not dot:
            return


def _optimizer(
    root: str,
    leaves: Iterable[_Leaf],
    weights: Mapping[str, str],
    masters: Mapping[tuple[int, int], str],
) -> OptimizerKeys:
    states: dict[str, dict[str, str]] = {}
    groups: dict[str, dict[str, str]] = {}
    for leaf in leaves:
        owner, rest = _split(leaf, weights)
        (states if leaf.part == "state" else groups).setdefault(owner, {})[rest] = leaf.key
    has_numbered_groups = all(map(is_number, groups))
    if states and has_numbered_groups and all(map(is_number, states)):
        form: Form = "by_number"
    else:
        form = "by_name" if groups and has_numbered_groups else "flattened"
    kinds = {owner: {canonical_kind(k): key for k, key in found.items()} for owner, found in states.items()}
    return OptimizerKeys(root, form, kinds, groups, masters)


def _split(leaf: _Leaf, weights: Mapping[str, str]) -> tuple[str, str]:
    """Whose state or field it is, and which; a nested state (Shampoo's) keeps its dots."""
    if not leaf.flat:
        return leaf.steps[0], ".".join(leaf.steps[1:])
    text = leaf.steps[0]
    whole, _, last = text.rpartition(".")
    owner = whole
    for _ in range(_DEEPEST):
        if owner in weights:
            return owner, text[len(owner) + 1 :]
        owner = owner.rpartition(".")[0]
    return whole, last
