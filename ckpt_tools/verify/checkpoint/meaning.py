"""Do the keys make a whole model: layers without gaps, all experts, states for weights, groups for states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.locate.detect import RECORD_FILE
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.megatron.dcp.read import OpenChoiceError, group_members, owners
from ckpt_tools.megatron.dcp.state_dict import OptimizerKeys, StateDict, is_number
from ckpt_tools.megatron.format import FORMATS, Weight
from ckpt_tools.megatron.fsdp_dtensor.parameters import packed_projections
from ckpt_tools.megatron.fsdp_dtensor.read import LocalNumbers, SmallValues, local_numbers, ranges
from ckpt_tools.megatron.keys import (
    BUFFERS,
    EXPERTS,
    HALVES,
    KEPT,
    ParameterKey,
    bucket_key,
    canonical_kind,
    fsdp_state,
    group_key,
    is_optimizer_key,
    split_expert,
    split_half,
    split_projection,
    state_key,
)
from ckpt_tools.megatron.names import MLA_DOWN, MLA_FUSED_DOWN, MTP_DISK, MTP_LIVE
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.record import read_record, stored_tp
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import model_space_states
from ckpt_tools.megatron.torch_dist.optimizers import Expected, expected_states, mixes_lion_and_adam
from ckpt_tools.megatron.torch_dist.stacking import layer_counts, missing_layers
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.roles import MASTER
from ckpt_tools.verify.report import Check, Findings


def stage_numbers(catalog: Catalog, common: CommonState) -> LocalNumbers | None:
    """What tells that an `fsdp_dtensor` checkpoint has the layer numbers of pipeline stages; None if it has not."""
    states = [found.name for found in map(fsdp_state, catalog.tensors) if found]
    groups = [found.name for found in map(group_key, catalog.objects) if found]
    stages = len({pp for pp, _ in FORMATS["fsdp_dtensor"].rng_ranks(catalog)})
    return local_numbers(FORMATS["fsdp_dtensor"].weights(catalog).shapes, (*states, *groups), common, stages)


def check_layers(
    weights: Sequence[Weight],
    problems: Iterable[str],
    common: CommonState,
    stages: LocalNumbers | None = None,
) -> Check:
    """Whether every block's layers run from 0 to the number of layers that the args say."""
    found = Findings("layers", "layers")
    if stages is not None:
        found.error("model.module.decoder.layers.", f"{stages}; {stages.way_out}")
    for problem in problems:
        found.error(problem.partition(":")[0], problem)
    names = [weight.name for weight in weights]
    counts = layer_counts(names)
    found.looked_at = sum(counts.values())
    for problem in missing_layers(names):
        found.error(problem.partition("*")[0], problem)
    expected, stored = common.arg("num_layers"), counts.get("decoder.layers.")
    if isinstance(expected, int) and stored is not None and stored != expected and stages is None:
        found.error("decoder.layers.", f"{stored} layers are stored, the args say {expected}")
    return found.done()


def check_experts(weights: Sequence[Weight], common: CommonState) -> Check:
    """Whether every expert layer has all of its experts, in every leaf."""
    found = Findings("experts", "expert sets")
    sets: dict[tuple[str, str], set[int]] = {}
    routers: dict[str, int] = {}
    for weight in weights:
        whole, half = split_half(weight.name)
        stored, number = split_expert(whole)
        module, _, leaf = stored.partition(EXPERTS)
        if weight.experts is not None:
            sets[f"{module}.experts", leaf + half] = set(range(weight.experts))
        elif number is not None:
            sets.setdefault((f"{module}.experts", leaf + half), set()).add(number)
        elif weight.name.endswith(".router.weight"):
            routers[weight.name.removesuffix(".router.weight") + ".experts"] = weight.shape[0]
    wanted = common.arg("num_experts", common.arg("num_moe_experts"))
    for (module, leaf), numbers in sets.items():
        found.looked_at += 1
        fallback = wanted if isinstance(wanted, int) else max(numbers) + 1
        expected = set(range(routers.get(module, fallback)))
        if numbers != expected:
            found.error(
                f"{module}.{leaf}",
                f"experts {ranges(numbers)} are stored, {len(expected)} are expected"
                + (" (the rows of the router)" if module in routers else ""),
            )
    with_experts = {module for module, _ in sets}
    for module in routers.keys() - with_experts:
        found.error(module, "there is a router, but no experts are stored")
    for module in with_experts:
        leaves = {leaf for other, leaf in sets if other == module}
        for leaf in ("linear_fc1.weight", "linear_fc2.weight"):
            if leaf not in leaves and not {f"{leaf}_w", f"{leaf}_v"} <= leaves:
                found.error(f"{module}.{leaf}", "no expert has this weight")
    return found.done()


def check_torch_dist_states(
    catalog: Catalog, common: CommonState, groups: Sequence[Mapping[str, Any]], inside: Iterable[str] = ()
) -> Check:
    """Whether every optimizer state has its weight, every weight all kinds of state, and all kinds are there.

    `inside` are the kinds of state that stand inside of objects (`dp_zero_gather_scatter`).
    """
    found = Findings("states", "states")
    named = (bucket_key(key) or state_key(key) for key in catalog.tensors)
    held = {canonical_kind(state.kind) for state in named if state} | set(inside)
    _check_expected(held, expected_states(common, groups), bool(groups), found)
    dtypes = {entry.dtype for key, entry in catalog.tensors.items() if not is_optimizer_key(key)}
    if held and MASTER not in held and dtypes - {"float32"}:
        found.warning(
            "optimizer", "it holds no fp32 masters of the weights: an unusual optimizer, or they were lost"
        )
    kinds: dict[str, dict[str, Any]] = {}
    for key, entry in catalog.tensors.items():
        if state := bucket_key(key):
            found.looked_at += 1
            kinds.setdefault(state.bucket, {})[state.kind] = entry.shape
    _check_buckets(kinds, found)
    if not any(map(state_key, catalog.tensors)):
        return found.done()
    legacy = common.arg("moe_use_legacy_grouped_gemm")
    try:
        states = model_space_states(catalog, "", None if legacy is None else bool(legacy))
    except CkptError as error:
        found.error("optimizer.state", str(error))
        return found.done()
    found.looked_at += len(states.states)
    have = {key: {k for k, other in states.states if other == key} for key in {w for _, w in states.states}}
    weights = {key: key for key in catalog.tensors if not is_optimizer_key(key)}
    if kinds:  # what has no state under its key has it in a bucket
        weights = {key: where for key, where in weights.items() if key in have}
    _check_kinds(weights, have, mixes_lion_and_adam(common), found)
    return found.done()


def _state_or_kept(key: str) -> ParameterKey | None:
    """The optimizer state that a key of `fsdp_dtensor` names, one that is kept besides it too."""
    return fsdp_state(key.removeprefix(KEPT))


def check_fsdp_states(catalog: Catalog, common: CommonState) -> Check:
    """Whether every optimizer state has its weight, of the same shape, and every weight all kinds of state."""
    found = Findings("states", "states")
    group = {of_group.field: None for of_group in map(group_key, catalog.objects) if of_group}
    held = {state.kind for state in map(_state_or_kept, catalog.tensors) if state}
    _check_expected(held, expected_states(common, [group]), bool(group), found)
    shapes = FORMATS["fsdp_dtensor"].weights(catalog).shapes
    have: dict[str, set[str]] = {}
    for key, entry in catalog.tensors.items():
        state = _state_or_kept(key)
        if not state:
            continue
        found.looked_at += 1
        name, kind = state
        if canonical_kind(kind) == MASTER:
            found.error(
                key,
                "an fp32 master among the states, where Megatron-LM's converter parks it and no loader asks for it; "
                "`repair` puts it in the place of the rounded weight",
            )
            continue
        have.setdefault(name, set()).add(kind)
        if name not in shapes:
            found.error(key, f"there is no weight model.module.{name}")
        elif entry.shape != shapes[name] and not (kind == "step" and entry.shape == ()):
            found.error(key, f"its shape is {entry.shape}, that of the weight {shapes[name]}")
    for name, shape in shapes.items():
        whole, half = split_half(name)
        if not half:
            continue
        other = whole + HALVES[half == HALVES[0]]
        if shapes.get(other) != shape:
            partner = f"{shapes[other]}" if other in shapes else "missing"
            found.error(f"model.module.{name}", f"its shape is {shape}, its other half {other} is {partner}")
    if have:
        where = {name: f"model.module.{name}" for name in shapes}
        _check_kinds(where, have, mixes_lion_and_adam(common), found)
    return found.done()


def check_torch_dist_groups(has_states: bool, groups: Sequence[Mapping[str, Any]], step_apart: bool) -> Check:
    """Whether there are parameter groups for the states, each with what an optimizer cannot do without.

    `step_apart` says that the step is kept outside the groups.
    """
    found = Findings("groups", "groups")
    found.looked_at = len(groups)
    if has_states and not groups:
        found.error("optimizer.param_groups", "there are optimizer states, but no parameter groups")
    for index, group in enumerate(groups):
        missing = [field for field in ("lr", "weight_decay") if field not in group]
        if missing:
            found.error(f"group {index}", f"fields {missing} are missing")
        if not step_apart and group.get("step") is None and _counts_steps(group):
            found.warning(f"group {index}", "no step is stored; Adam's bias correction would restart")
    return found.done()


def _counts_steps(group: Mapping[str, Any]) -> bool:
    """Whether the group's optimizer corrects a bias by the number of its steps: SGD, Muon and Lion do not."""
    return not (group.keys() & {"momentum", "momentum_beta"} or ("betas" in group and "eps" not in group))


def check_fsdp_groups(catalog: Catalog) -> Check:
    """Whether every parameter with a state has a complete group entry and a step."""
    found = Findings("groups", "parameters")
    fields: dict[str, set[str]] = {}
    for key in catalog.objects:
        if of_group := group_key(key):
            fields.setdefault(_group_name(of_group.name), set()).add(of_group.field)
    states = {state for state in map(fsdp_state, catalog.tensors) if state}
    with_state = {name for name, _ in states}
    wanted = {_group_name(name): name for name in with_state}
    found.looked_at = len(wanted)
    every_field = {field for some in fields.values() for field in some}
    for group, name in wanted.items():
        if group not in fields:
            found.error(name, "it has optimizer states, but no optimizer.param_to_group_meta entry")
        elif every_field - fields[group]:
            found.error(name, f"its group entry lacks {sorted(every_field - fields[group])}")
    for name in with_state:
        if (name, "step") not in states and "step" not in fields.get(_group_name(name), ()):
            found.error(name, "neither a step state nor a group field step: Adam would restart")
    for group in fields.keys() - wanted.keys():
        empty = " (an empty step in its name, as Megatron-LM's converter writes it; `repair` takes it out)"
        found.error(
            group, f"it has a group entry, but no optimizer states{empty if group.startswith('.') else ''}"
        )
    return found.done()


def has_step(optimizer: object) -> bool:
    """Whether an optimizer's common state holds a step outside its groups, at any depth."""
    if not isinstance(optimizer, Mapping):
        return False
    return any(
        (name in ("step", "common_step") and not isinstance(value, Mapping)) or has_step(value)
        for name, value in optimizer.items()
    )


def _check_expected(held: set[str], expected: Expected, has_groups: bool, found: Findings) -> None:
    """Every kind of state that the optimizer keeps is there, if there is an optimizer at all."""
    if not held and not has_groups:
        return
    if expected.kinds is None:
        found.warning("optimizer", f"whether states are missing cannot be known: {expected.why}")
    for kind in expected.missing(held):
        found.error("optimizer", f"no parameter has the state {kind}, but {expected.why}")


def _check_kinds(
    weights: Mapping[str, str], have: Mapping[str, set[str]], mixed: bool, found: Findings
) -> None:
    """No weight has a part of the states that others have; one without any is unusual unless it is a buffer.

    Muon's weights and those that it leaves to Adam have different ones. Lion keeps a part of Adam's (`mixed`).
    """
    sets = sorted(map(sorted, {frozenset(kinds) for kinds in have.values()}))
    for name, where in weights.items():
        kinds = have.get(name, set())
        more = next((other for other in sets if kinds < set(other)), None)
        if name in have and more and not mixed:
            missing = [kind for kind in more if kind not in kinds]
            found.error(where, f"its states {missing} are missing, others are there")
        elif name not in have and not name.endswith(BUFFERS):
            found.warning(where, "it has no optimizer state: a frozen weight, or states were lost")


def _check_buckets(buckets: Mapping[str, Mapping[str, tuple[int, ...]]], found: Findings) -> None:
    every_kind = {kind for kinds in buckets.values() for kind in kinds}
    for bucket, kinds in buckets.items():
        if every_kind - kinds.keys():
            found.error(bucket, f"{sorted(every_kind - kinds.keys())} are missing, others are there")
        if len(set(kinds.values())) > 1:
            found.error(bucket, f"its parts have different lengths: {dict(kinds)}")


def _group_name(name: str) -> str:
    """The spelling under which a parameter's state name and its group name are the same."""
    name = split_half(name)[0]
    part_of = split_projection(name)
    name = part_of[0] if part_of else name
    for part in MLA_DOWN:
        name = name.replace(part, MLA_FUSED_DOWN)
    return name.replace(MTP_DISK, MTP_LIVE)


def check_packing(files: Files, catalog: Catalog, common: CommonState) -> Check:
    """Whether the record, the rng states and the rows of packed projections are those of one job."""
    found = Findings("packing", "packed projections")
    shapes = FORMATS["fsdp_dtensor"].weights(catalog).shapes
    rows = {name: shape[0] if shape else 1 for name, shape in shapes.items()}
    packed = packed_projections(rows)
    found.looked_at = len(packed)
    try:
        tp = stored_tp(read_record(files), FORMATS["fsdp_dtensor"].rng_ranks(catalog), common.args)
    except CkptError as error:
        found.error(RECORD_FILE, str(error))
        return found.done()
    if tp is None:
        for name in packed[:1]:
            found.warning(
                name,
                "the tensor parallel size of its row order is not recorded; any other size gives other values",
            )
        return found.done()
    for name in packed:
        if rows[name] % tp.ranks:
            found.error(
                name,
                f"its {rows[name]} rows are not those of {tp.ranks} tensor-parallel ranks (by {tp.source})",
            )
    return found.done()


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
        _check_group_kinds(optimizer, list(_members(optimizer, catalog, values)), check)
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


def _check_group_kinds(optimizer: OptimizerKeys, members: Iterable[_Member], check: Findings) -> None:
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
