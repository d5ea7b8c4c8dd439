"""What each key of a plain PyTorch checkpoint is: only the nesting of dicts, which DCP records, shows it.

Models and optimizers name the entries of their state dicts, and a program puts both under its own names::

    model.<name>, <name>, app.model.<name>               the weights: torchtitan's flat ones are at the top
    optimizer.state.<name>.exp_avg                       `get_optimizer_state_dict`: by name
    optimizer.param_groups.0.lr, .params                   its groups hold the names of their parameters
    optimizer.state.<name>.exp_avg                       the same with `flatten_optimizer_state_dict`
    optimizer.param_groups.<name>.lr                       every parameter has its group's fields
    optimizer.state.7.exp_avg                            `optimizer.state_dict()`: by number, through all groups
    optimizer.optimizer.state.7.exp_avg                  Megatron's `torch_dcp`: so too, with masters next to it
    optimizer.fp32_from_fp16_params.0.7                    by group and place in it

A program saves its model inside of dicts (``model.``, ``app.model.``), and wrappers (DDP, FSDP, torch.compile,
activation checkpointing) add segments of their own, in front of all names or inside of some. What is in front is not
guessed from a list: callers that know the model's names pass them (`named_model`).

Which dict holds the model, the optimizer's names and shapes tell. Every other dict that may hold weights (an EMA, a
second model) is `more`, and no command leaves it out. Other keys (rng states, data loaders) travel unread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, NamedTuple, TypeAlias

from ckpt_tools.errors import MappingError, list_problems, raise_if
from ckpt_tools.megatron.keys import canonical_kind, state_role
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import FLOATING
from ckpt_tools.model.roles import MASTER, WEIGHT, Role

Form: TypeAlias = Literal["flattened", "by_name", "by_number"]
"""How an optimizer's states name their parameters."""
Shape: TypeAlias = tuple[int, ...]

_PARTS = ("state", "param_groups")
_MASTERS = "fp32_from_fp16_params"
EXTRA_STATE = "_extra_state"
_NUMBERS = {*FLOATING, "complex64", "complex128"}
_DIGITS = 9
_DEEPEST = (
    64  # names within names that are looked at: no module nests so, but a hostile key has a million dots
)
_OF_A_RUN = re.compile(
    r"(?:\w+_)?(?:optim(?:izer)?|scheduler|dataloader)s?(?:_\w+)?|(?:grad_?)?scaler|rng(?:_states?)?|train_state"
)
_STATES = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"}
_MEGATRON = re.compile(
    r"(?:.*\.)?(?:(?:decoder|encoder)\.layers\.\d+\.(?:self_attention|mlp|mixer)|embedding\.word_embeddings)\..+"
)


class _Leaf(NamedTuple):
    """A key inside an optimizer's state dict: `steps` are what follows `state` or `param_groups`."""

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
    prefix: str = ""  # in front of the names that its groups list, in `weights`; owners have it

    def all_keys(self) -> Iterator[str]:
        yield from self.masters.values()
        for owned in (*self.states.values(), *self.groups.values()):
            yield from owned.values()


@dataclass(frozen=True, slots=True)
class StateDict:
    """A checkpoint's keys, sorted; `model` is in front of every weight's name."""

    model: str
    weights: Mapping[str, str]  # name -> key
    optimizers: tuple[OptimizerKeys, ...]
    others: tuple[str, ...]
    more: tuple[str, ...] = ()  # those of `others` that may be weights, too

    def roles(self) -> dict[str, Role]:
        """What every tensor of models and optimizers is, by key."""
        roles: dict[str, Role] = dict.fromkeys((*self.weights.values(), *self.more), WEIGHT)
        for optimizer in self.optimizers:
            roles |= dict.fromkeys(optimizer.masters.values(), MASTER)
            for kinds in optimizer.states.values():
                roles |= {key: state_role(kind.rpartition(".")[2]) for kind, key in kinds.items()}
        return roles

    def of_kinds(self, kinds: Set[str]) -> set[str]:
        """The keys of all states of these kinds."""
        states = (one for optimizer in self.optimizers for one in optimizer.states.values())
        return {key for one in states for kind, key in one.items() if kind.rpartition(".")[2] in kinds}

    def parameters(self) -> dict[str, str]:
        """The parameter of every weight, and of every state that is named for it, by key."""
        owners = {key: name for name, key in self.weights.items()}
        for optimizer in self.optimizers:
            if optimizer.form != "by_number":
                owners |= {key: owner for owner, keys in optimizer.states.items() for key in keys.values()}
        return owners

    @property
    def layout(self) -> str:
        forms = {f"state_dict_{optimizer.form}" for optimizer in self.optimizers}
        return "none" if not forms else forms.pop() if len(forms) == 1 else "state_dict_mixed"


def is_megatron(found: StateDict) -> bool:
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
    sorted_keys: StateDict | None = catalog.derived.get("state_dict")
    if sorted_keys is None:
        sorted_keys = catalog.derived["state_dict"] = _read(catalog)
    return sorted_keys


def _read(catalog: Catalog) -> StateDict:
    keys = (*catalog.tensors, *catalog.objects)
    leaves = _optimizer_leaves(catalog, keys)
    roots: dict[str, list[_Leaf]] = {}
    for leaf in leaves:
        roots.setdefault(leaf.root, []).append(leaf)
    masters = _masters(catalog, roots)
    inside = {leaf.key for leaf in leaves} | {key for of_root in masters.values() for key in of_root.values()}
    parameters = {owner for leaf in leaves if (owner := _owner(leaf)) and not is_number(owner)}
    dicts = _possible_models(catalog, inside, parameters)
    claims = _trained_models(catalog, dicts, roots, parameters)
    trained = list(claims.values()) or [_Model(root, (root,)) for root in _likeliest(catalog, dicts)]
    model = shared_front(one.front for one in trained)
    weights = {
        key.removeprefix(model): key
        for root in dict.fromkeys(root for one in trained for root in one.dicts)
        for key in dicts[root]
        if key.startswith(model)
    }
    optimizers = tuple(
        _optimizer(
            root, inner, weights, masters[root], claims[root].front[len(model) :] if root in claims else ""
        )
        for root, inner in roots.items()
    )
    used = inside | set(weights.values())
    more = tuple(key for of_dict in dicts.values() for key in of_dict if key not in used)
    return StateDict(model, weights, optimizers, tuple(key for key in keys if key not in used), more)


def _optimizer_leaves(catalog: Catalog, keys: Iterable[str]) -> list[_Leaf]:
    """The keys of optimizers: a dict or a module may be called `state` too, but it has no groups."""
    possible = [leaves for key in keys if (leaves := _leaves(catalog, key))]
    grouped = {leaf.root for leaves in possible for leaf in leaves if leaf.part == "param_groups"}
    chosen = (
        next((leaf for leaf in leaves if leaf.root in grouped or "optim" in leaf.root), None)
        for leaves in possible
    )
    return [leaf for leaf in chosen if leaf]


def _leaves(catalog: Catalog, key: str) -> list[_Leaf]:
    """What a key names if it is of an optimizer's state dict, which may lie at several depths."""
    path = catalog.planner_paths.get(key)
    if path is None:
        return [leaf] if (leaf := _untold(key)) else []
    steps, leaves = [str(step) for step in path], list[_Leaf]()
    for at, step in enumerate(steps[:_DEEPEST]):
        part, _, rest = step.partition(".")
        if part not in _PARTS:
            continue
        root = "".join(f"{outer}." for outer in steps[:at])
        if not rest and at + 2 < len(steps):
            leaves.append(_Leaf(key, root, part, tuple(steps[at + 1 :]), False))
        if rest and at + 1 == len(steps):
            leaves.append(_Leaf(key, root, part, (rest,), True))
    return leaves


def _untold(key: str) -> _Leaf | None:
    """The same without planner data, when dots do not tell where a name begins: an optimizer's dict is called so."""
    steps = key.split(".", _DEEPEST)
    for at, step in enumerate(steps[1:-1], 1):
        if step in _PARTS and "optim" in steps[at - 1]:
            root = "".join(f"{outer}." for outer in steps[:at])
            return _Leaf(key, root, step, (key[len(root) + len(step) + 1 :],), True)
    return None


def _masters(catalog: Catalog, roots: Iterable[str]) -> dict[str, dict[tuple[int, int], str]]:
    """Masters that Megatron's 16-bit optimizer keeps next to its inner one, by the root of that."""
    masters: dict[str, dict[tuple[int, int], str]] = {}
    for key in catalog.tensors:
        head, name, place = key.partition(f"{_MASTERS}.")
        group, _, number = place.partition(".")
        if name and is_number(group) and is_number(number):
            masters.setdefault(head, {})[int(group), int(number)] = key
    return {root: masters.get(root.removesuffix("optimizer."), {}) for root in roots}


def is_number(text: str) -> bool:
    """Whether it is a number that a parameter or a group can have."""
    return len(text) <= _DIGITS and text.isascii() and text.isdigit()


class _Model(NamedTuple):
    """What is in front of the names of an optimizer's parameters, and the dicts that hold these."""

    front: str
    dicts: tuple[str, ...]


def _possible_models(catalog: Catalog, optimizers: Set[str], parameters: Set[str]) -> dict[str, list[str]]:
    """The keys of every dict that may be a model: one of its tensors may be a weight.

    `optimizers` are keys, `parameters` the names that optimizers know. Names alone tell a run's keys in no dict.
    """
    dicts: dict[str, list[str]] = {}
    models = set[str]()
    for key, entry in catalog.tensors.items():
        if key in optimizers or key.endswith(EXTRA_STATE):
            continue
        root = root_of(catalog, key)
        of_a_run = _is_of_a_run(key) and not any(name in parameters for name in endings(key))
        if of_a_run and not root:
            continue
        dicts.setdefault(root, []).append(key)
        if not of_a_run and (entry.dtype in _NUMBERS or len(entry.shape) > 1):
            models.add(root)
    return {root: keys for root, keys in dicts.items() if root in models}


def _is_of_a_run(key: str) -> bool:
    """Whether its name tells that it belongs to a run: an outer dict does, or it is a state's."""
    *dicts, last = key.split(".", 2)
    if dicts and dicts[0] in ("model", "module"):
        return False
    return last.rpartition(".")[2] in _STATES or any(map(_OF_A_RUN.fullmatch, dicts))


def _trained_models(
    catalog: Catalog,
    dicts: Mapping[str, list[str]],
    optimizers: Mapping[str, list[_Leaf]],
    parameters: Set[str],
) -> dict[str, _Model]:
    """The model that each optimizer trains, by the names or else the shapes of its states, where these tell."""
    shapes: dict[str, dict[str, Shape | None]] = {}  # root of an optimizer -> owner -> shape
    for root, leaves in optimizers.items():
        states: dict[str, list[str]] = {}
        for leaf in leaves:
            if leaf.part == "state" and (owner := _owner(leaf)):
                states.setdefault(owner, []).append(leaf.key)
        shapes[root] = {owner: shape_of_states(keys, catalog) for owner, keys in states.items()}
    keys_of: dict[str, list[tuple[str, str]]] = {}  # name -> (dict, key that ends with it)
    for root, keys in dicts.items() if parameters else ():
        for key in keys:
            for name in endings(key):
                if name in parameters:
                    keys_of.setdefault(name, []).append((root, key))
    held = {root: Counter(catalog.tensors[key].shape for key in keys) for root, keys in dicts.items()}
    models = {}
    for root, states_of in shapes.items():
        of_numbers = all(map(is_number, states_of))
        model = _by_shapes(held, states_of) if of_numbers else _by_names(catalog, keys_of, states_of)
        if states_of and model:
            models[root] = model
    return models


def _by_names(
    catalog: Catalog, keys_of: Mapping[str, list[tuple[str, str]]], shapes: Mapping[str, Shape | None]
) -> _Model | None:
    """The model with most of the names, with states of its weights' shapes."""
    votes, dicts = Counter[str](), dict[str, dict[str, None]]()
    for name, shape in shapes.items():
        for root, key in keys_of.get(name, ()):
            front = key[: len(key) - len(name)]
            dicts.setdefault(front, {})[root] = None
            votes[front] += 2 if shape in (None, catalog.tensors[key].shape) else 1
    if not votes:
        return None
    best = max(votes, key=lambda front: (votes[front], _is_called_model(front), -len(front)))
    return _Model(best, tuple(dicts[best]))


def _by_shapes(held: Mapping[str, Counter[Shape]], shapes: Mapping[str, Shape | None]) -> _Model | None:
    """The dict, or all dicts together, with tensors of the numbered states' shapes."""
    wanted = Counter(shape for shape in shapes.values() if shape is not None)
    fitting = [root for root, of in held.items() if of.total() >= len(shapes) and wanted <= of]
    if fitting:
        best = min(fitting, key=lambda root: (not _is_called_model(root), held[root].total()))
        return _Model(best, (best,))
    every = Counter[Shape]()
    for of in held.values():
        every.update(of)
    return (
        _Model(shared_front(held), tuple(held)) if every.total() >= len(shapes) and wanted <= every else None
    )


def _likeliest(catalog: Catalog, dicts: Mapping[str, list[str]]) -> list[str]:
    """Where no optimizer tells: the dict that is called `model`, else the largest."""

    def size(root: str) -> tuple[bool, int]:
        return _is_called_model(root), sum(catalog.tensors[key].numel for key in dicts[root])

    return [max(dicts, key=size)] if dicts else []


def _is_called_model(root: str) -> bool:
    return root == "model." or root.endswith(".model.")


def shared_front(names: Iterable[str]) -> str:
    """The segments that all names begin with, but for their last ones."""
    modules = [name.split(".")[:-1] for name in set(names)]
    ends = (min(modules), max(modules)) if modules else ((), ())  # what both have, all between have
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False))
    return "".join(f"{one}." for one, _ in same)


def shape_of_states(keys: Iterable[str], catalog: Catalog) -> Shape | None:
    """The shape of a parameter, where all its states with dimensions have one shape."""
    shapes = {e.shape for key in keys if (e := catalog.tensors.get(key)) is not None and e.shape}
    return shapes.pop() if len(shapes) == 1 else None


def root_of(catalog: Catalog, key: str) -> str:
    """The names of the dicts that hold a tensor, with their dots."""
    path = catalog.planner_paths.get(key)
    if path is None:
        return "model." if key.startswith("model.") else ""
    return "".join(f"{step}." for step in path[:-1])


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
    prefix: str,
) -> OptimizerKeys:
    states: dict[str, dict[str, str]] = {}
    groups: dict[str, dict[str, str]] = {}
    for leaf in leaves:
        owner, rest = _split(leaf, weights, prefix)
        (states if leaf.part == "state" else groups).setdefault(owner, {})[rest] = leaf.key
    has_numbered_groups = all(map(is_number, groups))
    if states and has_numbered_groups and all(map(is_number, states)):
        form: Form = "by_number"
    else:
        form = "by_name" if groups and has_numbered_groups else "flattened"
    kinds = {owner: {canonical_kind(k): key for k, key in found.items()} for owner, found in states.items()}
    return OptimizerKeys(root, form, kinds, groups, masters, prefix)


def _split(leaf: _Leaf, weights: Mapping[str, str], prefix: str) -> tuple[str, str]:
    """Whose state or field it is, and which; a nested state (Shampoo's) keeps its dots."""
    if not leaf.flat:
        owner, *rest = leaf.steps
        return owner if is_number(owner) else f"{prefix}{owner}", ".".join(rest)
    text = leaf.steps[0]
    whole, _, last = text.rpartition(".")
    owner = whole
    for _ in range(_DEEPEST):
        if f"{prefix}{owner}" in weights:
            return f"{prefix}{owner}", text[len(owner) + 1 :]
        owner = owner.rpartition(".")[0]
    return whole if is_number(whole) else f"{prefix}{whole}", last


_INSIDE = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model in a state dict: its tensors by name, all of which begin with `prefix`.

    `stray` are keys of the same dict that do not, `beside` those of other dicts (a data loader, a
    step count), `optimizer` those of optimizers; tensors and objects.
    """

    prefix: str
    keys: Mapping[str, str]  # name -> key
    stray: tuple[str, ...]
    beside: tuple[str, ...]
    optimizer: tuple[str, ...]


def without_segments(key: str) -> str:
    return _INSIDE.sub("", key)


def possible_names(catalog: Catalog) -> frozenset[str]:
    return frozenset(
        name for key in outside_optimizers(catalog)[0] for name in endings(without_segments(key))
    )


def named_model(catalog: Catalog, wanted: Collection[str]) -> NamedModel:
    """The model that most of the `wanted` names are found in."""
    tensors, optimizer = outside_optimizers(catalog)
    held: dict[str, dict[str, str]] = {}  # prefix -> wanted name -> key
    for key in tensors:
        name = without_segments(key)
        wanted_name = next((one for one in endings(name) if one in wanted), None)
        if wanted_name is not None:
            held.setdefault(name[: len(name) - len(wanted_name)], {})[wanted_name] = key
    whole = [prefix for prefix, names in held.items() if len(names) == len(wanted)]
    if len(whole) > 1:
        raise MappingError(
            f"{catalog.root} holds the model {len(whole)} times; leave out what is not meant with --ignore-keys "
            "GLOB:\n" + list_problems(f"{prefix}*" for prefix in whole),
            whole,
        )
    prefix = max(held, key=lambda prefix: len(held[prefix]), default="")
    roots = {_root(catalog, key) for key in held.get(prefix, {}).values()}
    keys: dict[str, list[str]] = {}
    stray, others = list[str](), [key for key in catalog.objects if key not in optimizer]
    for key in tensors:
        name, root = without_segments(key), _root(catalog, key)
        if root is not None and root not in roots:
            others.append(key)
        elif name.startswith(prefix):
            keys.setdefault(name.removeprefix(prefix), []).append(key)
        else:
            stray.append(key)
    twice = [" and ".join(same) for same in keys.values() if len(same) > 1]
    raise_if(twice, MappingError, "keys that are one name without their wrappers")
    others += [key for key in catalog.tensors if key.endswith(EXTRA_STATE) and key not in optimizer]
    first = {name: same[0] for name, same in keys.items()}
    return NamedModel(prefix, first, tuple(stray), tuple(others), tuple(optimizer))


def outside_optimizers(catalog: Catalog) -> tuple[list[str], dict[str, None]]:
    """The tensors that no optimizer has, and the keys of optimizers."""
    optimizer = dict.fromkeys(key for one in read_state_dict(catalog).optimizers for key in one.all_keys())
    return [k for k in catalog.tensors if k not in optimizer and not k.endswith(EXTRA_STATE)], optimizer


def _root(catalog: Catalog, key: str) -> tuple[str | int, ...] | None:
    """The dicts that hold a tensor, None if unknown."""
    path = catalog.planner_paths.get(key)
    return None if path is None else tuple(path[:-1])


# ---- two state dicts of one model, one of which has it inside of a wrapper or of another dict

_Meaning = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one of two sides has its keys for those of the other.

    Attributes:
        side: which of the two, 0 or 1.
        keys: of every tensor and object -> what the other side calls it, or the key itself.
        names: of parameters, as groups of an optimizer list them -> the other side's.
        lists: the keys of those lists.
        in_front: what is in front of the names, here and there.
        inside: the names differ inside, too.
    """

    side: int
    keys: Mapping[str, str]
    names: Mapping[str, str]
    lists: tuple[str, ...]
    in_front: tuple[str, str]
    inside: bool


class _Names:
    """The model of one side: its tensors by name, once the segments that wrappers put inside are taken out."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        state_dict = read_state_dict(catalog)
        self.front, weights = state_dict.model, state_dict.weights
        if not catalog.planner_paths:  # then nothing but its keys tells the model's dict
            self.front, weights = "", {key: key for key in outside_optimizers(catalog)[0]}
        self.given = {without_segments(name): name for name in weights}
        self.is_clear = bool(weights) and len(self.given) == len(weights)
        self.has_segments = any(bare != name for bare, name in self.given.items())
        self._key = weights
        self._optimizers = state_dict.optimizers
        self.head = shared_front(self.given)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by what is left of its name behind what all have in common."""
        tensors = self._catalog.tensors
        return {bare[len(self.head) :]: tensors[self._key[n]].shape for bare, n in self.given.items()}

    def keys(self) -> set[str]:
        return set(self._key.values())

    def meanings(self, prefix: str) -> dict[_Meaning, str]:
        """What every key means once the names are without `prefix`."""

        def bare(name: str) -> str:
            return without_segments(name).removeprefix(prefix)

        meanings: dict[_Meaning, str] = {("model", bare(name)): key for name, key in self._key.items()}
        for one in self._optimizers:
            for part, owners in (("state", one.states), ("group", one.groups)):
                for owner, fields in owners.items():
                    meanings |= {(one.root, part, bare(owner), kind): key for kind, key in fields.items()}
        named = set(meanings.values())
        for key in (*self._catalog.tensors, *self._catalog.objects):
            if key not in named:
                inside = self.front != "" and key.startswith(self.front)
                name = bare(key.removeprefix(self.front)) if inside else key
                meanings["model" if inside else "", name] = key
        return meanings

    def lists(self) -> Iterator[str]:
        for one in self._optimizers:
            yield from (fields["params"] for fields in one.groups.values() if "params" in fields)


def spelled_as(sides: tuple[Catalog, Catalog]) -> Spelling | None:
    """What the side with more in its names calls the other's.

    `module.` of DDP, `_fsdp_wrapped_module.` of FSDP, `model.` of a program that saves its model so: such a prefix
    may have any name, so it is proven instead. Without it all names of one side must be all names of the other, of
    the same shapes; a prefix on both sides (`actor.` here, `critic.` there) may be two models and proves nothing.

    None: the model's tensors have the same keys as they are, or it is not proven that the names are of one model.
    """
    if sides[0].tensors.keys() == sides[1].tensors.keys():
        return None
    models = tuple(map(_Names, sides))
    if models[0].keys() == models[1].keys():
        return None
    if not all(one.is_clear for one in models) or models[0].shapes() != models[1].shapes():
        return None
    prefixes = _without_shared_end(models[0].head, models[1].head)
    if all(prefixes):
        return None
    lengths = [sum(map(len, one.keys())) for one in models]
    side = 0 if lengths[0] > lengths[1] else 1
    (own, prefix), (other, other_prefix) = [(models[n], prefixes[n]) for n in (side, 1 - side)]
    theirs = other.meanings(other_prefix)
    keys = {key: theirs.get(meaning, key) for meaning, key in own.meanings(prefix).items()}
    if len(set(keys.values())) < len(sides[side].tensors) + len(sides[side].objects):
        return None  # two keys that mean the same
    names = {name: other.given[other_prefix + bare.removeprefix(prefix)] for bare, name in own.given.items()}
    in_front = own.front + prefix, other.front + other_prefix
    return Spelling(side, keys, names, tuple(own.lists()), in_front, own.has_segments or other.has_segments)


def _without_shared_end(a: str, b: str) -> tuple[str, str]:
    first, second = a.split(".")[:-1], b.split(".")[:-1]
    while first and second and first[-1] == second[-1]:
        del first[-1], second[-1]
    return "".join(f"{one}." for one in first), "".join(f"{one}." for one in second)
