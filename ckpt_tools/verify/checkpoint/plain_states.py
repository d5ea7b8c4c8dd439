"""Whether the optimizers of a plain PyTorch state dict belong to its model: no rule of Megatron's is asked.

Programs differ in which parameters they train and what their optimizers keep, so nothing is missed that torch does
not ask for: buffers and frozen weights have no states, and optimizers of one model may keep different ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.megatron.dcp.read import OpenChoiceError, group_members, owners
from ckpt_tools.megatron.dcp.state_dict import OptimizerKeys, StateDict, is_number
from ckpt_tools.megatron.fsdp_dtensor.read import SmallValues
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.verify.report import Check, Findings

_LIKE_WEIGHTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
"""States that have an element for each of the weight's, whatever the optimizer; others may have any shape."""


class _Member(NamedTuple):
    """A parameter as an optimizer names it, and what it shares with those of its group."""

    owner: str
    group: object


def check_plain_states(files: Files, catalog: Catalog, found: StateDict, trust_pickle: bool) -> Check:
    """Every state has its weight, of the weight's shape, and the parameters of a group have the same kinds."""
    check = Findings("states", "states")
    values = SmallValues(files, trust_pickle)
    for optimizer in found.optimizers:
        check.looked_at += sum(map(len, optimizer.states.values())) + len(optimizer.masters)
        try:
            names = owners(optimizer, found, catalog, values)
        except OpenChoiceError:
            names = {}
        except CkptError as error:
            check.failure(f"{optimizer.root}state", error)
            continue
        _check_shapes(names, catalog, found, check)
        _check_kinds(optimizer, list(_members(optimizer, catalog, values)), check)
    return check.done()


def check_plain_groups(files: Files, catalog: Catalog, found: StateDict, trust_pickle: bool) -> Check:
    """Every parameter with states is in one group, which has what an optimizer cannot do without."""
    check = Findings("groups", "groups")
    values = SmallValues(files, trust_pickle)
    for optimizer in found.optimizers:
        check.looked_at += len(optimizer.groups)
        every = {field for fields in optimizer.groups.values() for field in fields}
        for owner, fields in optimizer.groups.items():
            if "lr" in every and "lr" not in fields:
                check.error(
                    f"{optimizer.root}param_groups.{owner}", "the field lr is missing, others have it"
                )
        try:
            grouped = [member.owner for member in _members(optimizer, catalog, values)]
        except CkptError as error:
            check.failure(f"{optimizer.root}param_groups", error)
            continue
        for owner in _twice(grouped):
            check.error(f"{optimizer.root}param_groups", f"parameter {owner} is in two groups")
        for owner in optimizer.states.keys() - set(grouped):
            check.error(f"{optimizer.root}state.{owner}", "it is in none of the optimizer's groups")
    return check.done()


def _members(optimizer: OptimizerKeys, catalog: Catalog, values: SmallValues) -> Iterator[_Member]:
    """Every parameter of an optimizer's groups."""
    if optimizer.form == "flattened":  # groups with equal fields are one as far as anybody can tell
        yield from (_Member(owner, frozenset(fields)) for owner, fields in optimizer.groups.items())
        return
    for number, owner_names in enumerate(group_members(optimizer, catalog, values)):
        yield from (_Member(str(owner), number) for owner in owner_names)


def _check_shapes(names: Mapping[str, str], catalog: Catalog, found: StateDict, check: Findings) -> None:
    for key, name in names.items():
        if name not in found.weights:
            check.error(key, f"there is no weight {found.model}{name}")
            continue
        kind = key.rpartition(".")[2]
        weight, entry = catalog.tensors[found.weights[name]], catalog.tensors.get(key)
        is_like = kind in _LIKE_WEIGHTS or is_number(kind)  # a master is named by its place
        if entry is not None and is_like and entry.shape != weight.shape:
            check.error(key, f"its shape is {entry.shape}, that of the weight {weight.shape}")


def _check_kinds(optimizer: OptimizerKeys, members: Iterable[_Member], check: Findings) -> None:
    """A parameter has what the others of its group have, or nothing: it had no gradient yet."""
    of_group: dict[object, dict[str, frozenset[str]]] = {}
    for owner, group in members:
        of_group.setdefault(group, {})[owner] = frozenset(optimizer.states.get(owner, {}))
    for held in of_group.values():
        every = frozenset[str]().union(*held.values())
        for owner, kinds in held.items():
            where = f"{optimizer.root}state.{owner}"
            if kinds and kinds < every:
                check.error(
                    where, f"states {sorted(every - kinds)} are missing, others of its group have them"
                )
            elif not kinds and every:
                check.warning(
                    where, "it is in a group and has no state: it never had a gradient, or states were lost"
                )


def _twice(names: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    return {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
