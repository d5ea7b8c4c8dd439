"""To the `Target` of an `fsdp_dtensor` checkpoint, from a `Model` or from one of another topology: all decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpt_tools.errors import MappingError, UsageError, raise_if
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.parameters import (
    GatingChoice,
    LiveParameter,
    StoredParameter,
    fused_rows,
    live_parameters,
    mark_gated,
    packed_projections,
    stored_parameters,
)
from ckpt_tools.megatron.fsdp_dtensor.read import FsdpSource
from ckpt_tools.megatron.fsdp_dtensor.tensors import (
    Path,
    Prefixes,
    backfill_groups,
    group_objects,
    leaves,
    model_tensors,
    rng_items,
    roles_of,
    running_dtype,
    state_prefix,
    state_tensors,
    step_tensors,
)
from ckpt_tools.megatron.hybrid import is_hybrid
from ckpt_tools.megatron.keys import COMMON_ITEMS, EXPERTS, STEP, parameter_of, rng_key, role_of
from ckpt_tools.megatron.names import (
    BRIDGE,
    DIALECTS,
    MTP_DISK,
    MTP_LIVE,
    Dialect,
    ModelStyle,
    dialect_for,
)
from ckpt_tools.megatron.param_groups import Membership, derive_memberships, merge_map, rules_of
from ckpt_tools.megatron.run_state.common_state import ARGS_FROM_MODEL_CONFIG, args_from_model_config
from ckpt_tools.megatron.run_state.record import Size
from ckpt_tools.megatron.torch_dist.grids import refuse_incomplete
from ckpt_tools.megatron.torch_dist.optimizers import (
    refuse_missing_states,
    refuse_partial_states,
)
from ckpt_tools.megatron.torch_dist.stacking import contradicted_layers
from ckpt_tools.megatron.vocab import VocabChange, Vocabulary, resize_vocab, told_tokens, vocabulary
from ckpt_tools.model.catalog import Catalog, Item, concat
from ckpt_tools.model.dtypes import check_dtype
from ckpt_tools.model.model import Model, unread_note
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import InlineTensor, Target, TargetObject, TargetTensor
from ckpt_tools.model.views import Source

NOT_LOADED = "Megatron-FSDP resumes from Adam's exp_avg and exp_avg_sq only"


@dataclass(frozen=True, slots=True)
class Part:
    """Some items of a target, and what their making left out or filled in."""

    tensors: Sequence[TargetTensor] = ()
    inline: tuple[InlineTensor, ...] = ()
    objects: Sequence[TargetObject] = ()
    dropped: tuple[str, ...] = ()
    backfilled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    memberships: Mapping[str, Membership] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FsdpTarget:
    """A target, the live parameters it was made from, and what was decided on the way."""

    target: Target
    parameters: tuple[LiveParameter, ...]
    memberships: Mapping[str, Membership]
    dialect: Dialect
    style: ModelStyle
    vocab: VocabChange
    vocabulary: Vocabulary | None
    tokens: int | None  # of the vocabulary, where it is known

    @property
    def packed(self) -> tuple[str, ...]:
        """Names of the parameters with rows in an order that only one tensor-parallel size has."""
        return tuple(p.name for p in self.parameters if p.is_packed)


def build_fsdp_target(model: Model, options: TargetOptions) -> FsdpTarget:
    check_options(options)
    prefixes = Prefixes(options.model_prefix, options.state_prefix or state_prefix(model))
    optimizer = partial(_optimizer_part, model, options, prefixes)
    return build_live_target(model, options, choose_dialect(model, options), prefixes.model, optimizer)


def build_live_target(
    model: Model,
    options: TargetOptions,
    dialect: Dialect,
    prefix: str,
    optimizer_part: Callable[[Sequence[LiveParameter]], Part],
    *,
    halves: bool = True,
) -> FsdpTarget:
    """A target with the names of the running model, its weights under `prefix`; `halves` of gated ones apart."""
    style, notes = _choose_style(model, options)
    tp = options.tp or writer_tp(model).ranks
    parameters = _choose_parameters(model, options, style, dialect, tp, halves)
    notes += _dialect_notes(parameters, model, dialect, options)
    vocab = _choose_vocab(model, options, parameters)
    parameters = vocab.parameters
    weights = [tensor for p in parameters for tensor in model_tensors(p, prefix, options.dtype)]
    optimizer = optimizer_part(parameters)
    common = _common_part(model, options, dialect, tp)
    target = Target(
        tensors=(*weights, *optimizer.tensors),
        inline=(*optimizer.inline, *common.inline),
        objects=(*optimizer.objects, *common.objects),
        dropped=(*model.dropped, *optimizer.dropped, *common.dropped),
        renamed=_renamed(parameters),
        backfilled=optimizer.backfilled,
        notes=(*unread_note(model), *model.notes, *notes, *vocab.notes, *optimizer.notes, *common.notes),
    )
    args = model.common.settings
    tokens = told_tokens(args)
    return FsdpTarget(
        target,
        tuple(parameters),
        optimizer.memberships,
        dialect,
        style,
        vocab,
        vocabulary(((p.name, p.shape) for p in parameters), args, options.vocab_size),
        options.vocab_size or (tokens[0] if len(tokens) == 1 else None),
    )


def trained_parameters(
    model: Model, options: TargetOptions, parameters: Sequence[LiveParameter]
) -> list[LiveParameter] | None:
    """Those with optimizer states, which are whole; None where no optimizer is written."""
    if options.weights_only:
        return None
    if model.optimizer_layout is not None or model.groups:
        refuse_missing_states(model.roles, model.common, model.groups)
    if model.optimizer_layout is None:
        return None
    trained = [p for p in parameters if roles_of(p)]
    with_masters = MASTER in model.roles
    held = (
        (p.name, {*roles_of(p), *([MASTER] if with_masters and running_dtype(p) == "float32" else [])})
        for p in trained  # weights in fp32 need no master
    )
    refuse_partial_states(held, model.common)
    return trained


def _optimizer_part(
    model: Model, options: TargetOptions, prefixes: Prefixes, parameters: Sequence[LiveParameter]
) -> Part:
    """States, steps and group fields of every trainable parameter; nothing for a conversion of weights."""
    trainable = trained_parameters(model, options, parameters)
    if trainable is None:
        return Part()
    if model.own_optimizer is not None:
        kinds = told_kinds(trainable)
        weights = "its masters" if MASTER in model.roles else "as stored"
        note = (
            f"no optimizer is written: {NOT_LOADED}, and the source's is {optimizer_name(model)}. The weights are "
            f"{weights}; the job starts a new optimizer"
        )
        return Part(dropped=(f"optimizer states {kinds}: {NOT_LOADED}",) if kinds else (), notes=(note,))
    notes: list[str] = []
    if MASTER not in model.roles and any(p.dtype != "float32" for p in model.parameters):
        notes.append("the optimizer holds no fp32 masters: weights are written as rounded as they are stored")
    groups, backfilled = backfill_groups(model.groups, model.scheduler, model.step)
    memberships, map_notes = choose_memberships(model, options, trainable)
    notes += map_notes
    live = {p.name for p in trainable}
    notes += [
        f"{p.name}: no optimizer state in the source (buffer or frozen weight)"
        for p in parameters
        if p.name not in live
    ]
    return Part(
        tensors=tuple(tensor for p in trainable for tensor in state_tensors(p, prefixes)),
        inline=tuple(step_tensors(trainable, memberships, groups, prefixes)),
        objects=tuple(group_objects(trainable, memberships, groups, prefixes)),
        backfilled=tuple(backfilled),
        notes=tuple(notes),
        memberships=memberships,
    )


def check_options(options: TargetOptions) -> None:
    """Refuse options that cannot be met whatever the checkpoint."""
    if options.dtype is not None and not options.weights_only:
        raise UsageError(
            "--dtype goes with --weights-only: a job that resumes needs its fp32 masters as they are"
        )
    check_dtype(options.dtype)
    if options.tp is not None and options.tp < 1:
        raise UsageError(f"--tp {options.tp}: at least one rank is needed")


def choose_dialect(model: Model, options: TargetOptions) -> Dialect:
    """The dialect asked for, else Bridge's for a source or model of Bridge's and Megatron-LM main's for any other."""
    otherwise = BRIDGE if model.settings.bridge else "main"
    dialect = dialect_for(options.dialect, otherwise, (p.name for p in model.parameters))
    if not options.rename_mtp or dialect.mtp_in_state == MTP_LIVE:
        return dialect
    if options.dialect:
        raise UsageError(
            f"--rename-mtp-keys contradicts --target {dialect.name}, which keeps `transformer_layer`"
        )
    return replace(dialect, mtp_in_state=MTP_LIVE)


def _choose_style(model: Model, options: TargetOptions) -> tuple[ModelStyle, list[str]]:
    """The facts of the model that names depend on, and a note for each that was assumed."""
    settings, notes = model.settings, []
    names = {p.name for p in model.parameters}
    local = options.layer_spec == "local" if options.layer_spec else settings.local_norms
    if settings.hybrid or is_hybrid(names):
        if options.layer_spec == "local":
            raise MappingError(
                "--layer-spec local: a HybridModel has Transformer Engine's layers whatever its args say"
            )
        local = False
    fused_norms = (".linear_qkv.layer_norm_weight", ".linear_fc1.layer_norm_weight")
    if local is None and any(name.endswith(fused_norms) for name in names):
        notes.append("layer spec: no args name it; Transformer Engine's names are used (--layer-spec local)")
    grouped = options.experts == "grouped" if options.experts else settings.grouped_experts
    if grouped is None:
        if any(EXPERTS in name for name in names):
            raise MappingError(
                "the model has experts, and no args say whether the loading job holds them in one grouped module "
                "or in a module each; pass --experts grouped (--moe-grouped-gemm) or --experts sequential"
            )
        grouped = False
    return ModelStyle(bool(local), grouped, settings.fused_mla_down), notes


def _choose_parameters(
    model: Model, options: TargetOptions, style: ModelStyle, dialect: Dialect, tp: int, halves: bool
) -> list[LiveParameter]:
    """The live parameters of the target; checks names for clashes and layers for gaps.

    Gated ones are marked, for a target that holds their `halves` apart.
    """
    parameters = live_parameters(model.parameters, style, dialect, tp)
    if halves:
        choice = GatingChoice(model.settings.swiglu, options.swiglu, options.swiglu_modules)
        parameters = mark_gated(parameters, choice)
    seen: dict[str, LiveParameter] = {}
    problems = []
    for parameter in parameters:
        if parameter.name in seen:
            keys = [p.origin for p in (*seen[parameter.name].stored, *parameter.stored)]
            problems.append(f"{keys} would all be written as {parameter.name}")
        seen[parameter.name] = parameter
    problems += contradicted_layers((p.name for p in model.parameters), model.settings.num_layers)
    raise_if(problems, MappingError, "the weights contradict each other or the args")
    return parameters


def _choose_vocab(model: Model, options: TargetOptions, parameters: list[LiveParameter]) -> VocabChange:
    """The parameters with the vocabulary size that was asked for; unchanged when none was.

    Rows beyond the tokens that the args tell of are known to be padding; a smaller vocabulary has to be proven.
    """
    rows = options.vocab_size_padded
    if rows is None:
        if options.vocab_size is not None:
            raise UsageError("--vocab-size only tells padding from tokens for --vocab-size-padded")
        return VocabChange(parameters, (), 0, ())
    if rows < 1:
        raise UsageError(f"--vocab-size-padded {rows}: at least one row is needed")
    if options.vocab_size is not None and options.vocab_size < 1:
        raise UsageError(f"--vocab-size {options.vocab_size}: at least one token is needed")
    tokens = max(told_tokens(model.common.settings), default=None)
    if options.vocab_size is not None or tokens is None or rows < tokens:
        return resize_vocab(parameters, rows, options.vocab_size)
    change = resize_vocab(parameters, rows, tokens)
    return replace(change, notes=(*change.notes, f"vocabulary: {tokens} tokens, as the source's args tell"))


def choose_memberships(
    model: Model, options: TargetOptions, trainable: Sequence[LiveParameter]
) -> tuple[dict[str, Membership], list[str]]:
    """Every trainable parameter's group: derived, a given map put over it; and notes."""
    rules = rules_of(model.common, model.groups)
    if options.group_map is None:
        return derive_memberships(trainable, model.groups, rules), []
    try:
        derived = derive_memberships(trainable, model.groups, rules)
    except MappingError:  # the map has to do alone, and merge_map says which names it lacks
        derived = None
    names = list(dict.fromkeys(p.group_name for p in trainable))
    return merge_map(derived, options.group_map, names, model.groups, options.strict_map)


def writer_tp(model: Model) -> Size:
    """Tensor-parallel ranks of the writer's first stage, as far as rng states or args tell."""
    held = max((t + 1 for p, t in model.rng if p == 0), default=None)
    if held is not None:
        return Size(held, "the source's rng states")
    return Size(model.settings.tp, "the source's args") if model.settings.tp else Size(1, "default")


def optimizer_name(model: Model) -> str:
    """What the args call the optimizer, else the states that it keeps."""
    kinds = [role for role in model.roles if role != MASTER]
    named = model.common.arg("optimizer")
    return named if isinstance(named, str) else f"one with {', '.join(kinds) or 'no states'}"


def told_kinds(trainable: Iterable[LiveParameter]) -> str:
    """Every kind of state but the master, of how many parameters it is, and of how many elements."""
    held: dict[str, list[LiveParameter]] = {}
    for parameter in trainable:
        for kind in roles_of(parameter):
            if kind != MASTER:
                held.setdefault(kind, []).append(parameter)
    return ", ".join(
        f"{kind} ({len(of_kind):,} parameters, {sum(math.prod(p.shape) for p in of_kind):,} elements)"
        for kind, of_kind in held.items()
    )


def _common_part(model: Model, options: TargetOptions, dialect: Dialect, tp: int) -> Part:
    notes: list[str] = []
    values: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    stored = model.common.values
    values |= {k: stored[k] for k in COMMON_ITEMS if k in stored and k != "args"}
    if "iteration" not in stored:
        notes.append("iteration: the source does not tell it; written as 0")
    if model.args_object is not None:
        values["args"] = model.args_object
    elif dialect.name != "bridge":  # Megatron-LM refuses a checkpoint without args, Bridge asks for none
        config = model.common.model_config
        values["args"] = args_from_model_config(config, values["iteration"], model.settings.swiglu)
        held = values["args"].attributes
        asked = [name for name in (*ARGS_FROM_MODEL_CONFIG, "iteration") if name in held]
        others = f" and {len(held) - len(asked)} more settings of its run_config.yaml" if config else ""
        notes.append(
            f"args: the source has none; made up with {', '.join(asked)}{others}. Load with --finetune if a check "
            "asks for more"
        )
    dropped = [
        f"common state {name}: not part of fsdp_dtensor"
        for name in stored
        if name not in {*COMMON_ITEMS, "optimizer", "opt_param_scheduler", "lr_scheduler"}
    ]
    tensors: list[InlineTensor] = []
    objects: list[TargetObject] = []
    if options.weights_only:
        dropped.append("optimizer state, parameter groups, scheduler and rng: --weights-only")
    else:
        values["opt_param_scheduler"] = model.scheduler
        if model.optimizer_layout is not None and not model.scheduler:
            notes.append("opt_param_scheduler: the source has none, and a strict load asks for it")
        if model.grad_scaler:
            values["optimizer"] = {"grad_scaler": model.grad_scaler}
            notes.append(
                "the loss scaler is kept as optimizer.grad_scaler.*; Megatron-FSDP does not ask for it"
            )
        refuse_incomplete(found for found in model.incomplete if model.rng and found[0] == "rng_state")
        tensors, objects, rng_notes = rng_items(model.rng, tp)
        notes += rng_notes
    for name, value in values.items():
        more_tensors, more_objects = leaves(value, (name,))
        tensors += more_tensors
        objects += more_objects
    return Part(inline=tuple(tensors), objects=tuple(objects), dropped=tuple(dropped), notes=tuple(notes))


def _dialect_notes(
    parameters: Sequence[LiveParameter], model: Model, dialect: Dialect, options: TargetOptions
) -> list[str]:
    """A note when the model has parts that other targets would name differently."""
    kinds = {
        "MTP": any(
            ".mtp." in f".{p.name}" and (MTP_DISK in p.name or MTP_LIVE in p.name) for p in parameters
        ),
        "fused MLA": model.settings.fused_mla_down,
        "GDN": any(".in_proj." in p.name and p.name.endswith(".query") for p in model.parameters),
        "Mamba": any("mixer.conv1d." in p.name for p in model.parameters),
    }
    parts = [kind for kind, present in kinds.items() if present]
    if not parts:
        return []
    others = ", ".join(name for name in DIALECTS if name != dialect.name)
    chosen = "chosen" if options.dialect else "the default"
    return [f"{' and '.join(parts)} names follow --target {dialect.name} ({chosen}); others: {others}"]


def _renamed(parameters: Sequence[LiveParameter]) -> tuple[str, ...]:
    """One line per stored name that changed by more than a layer number."""
    return tuple(
        f"{stored.name} -> {p.name}{' (_w, _v)' if p.gated else ''}"
        for p in parameters
        for stored in p.stored
        if stored.name != p.name or p.gated
    )


# ---- the same checkpoint for another topology: nothing is computed


@dataclass(frozen=True, slots=True)
class Relayout:
    """The target, and for each of its objects the stored archive that is copied byte for byte."""

    target: Target
    archives: tuple[tuple[str, Item], ...]


def build_relayout(source: FsdpSource, wanted: Size | None) -> Relayout:
    """Everything that `source` holds, for a job of `wanted` tensor-parallel ranks (None: the source's number).

    Two things depend on their number: the rows of fused projections (gated delta nets, Mamba) are grouped by rank,
    and each rank has its own rng states.
    """
    catalog = source.catalog
    writer = None if source.tp is None else source.tp.ranks
    tp = writer if wanted is None else wanted.ranks
    regrouped = {} if tp is None or tp == writer else dict(_regrouped(source, writer, tp))
    tensors: list[TargetTensor] = []
    objects: list[TargetObject] = []
    archives: list[tuple[str, Item]] = []
    for old, key, path in _keys(catalog, tp, writer):
        if old in catalog.objects:
            objects.append(TargetObject(key, None, path))
            archives.append((key, catalog.objects[old].item))
            continue
        entry = catalog.tensors[old]
        of = parameter_of(old)
        tensors.append(
            TargetTensor(
                key,
                entry.dtype,
                entry.shape,
                regrouped.get(old, (Source(old),)),
                path,
                parameter=of.name if of and of.kind != STEP else "",
                role=role_of(old),
            )
        )
    target = Target(
        tuple(tensors),
        objects=tuple(objects),
        dropped=source.ignored,
        notes=tuple(_notes(regrouped, writer, tp)),
    )
    return Relayout(target, tuple(archives))


def _keys(catalog: Catalog, tp: int | None, writer: int | None) -> Iterator[tuple[str, str, Path]]:
    """(stored key, key in the target, its planner path); rng states for `tp` ranks, the last rank's repeated."""
    for old in (*catalog.objects, *catalog.tensors):
        path = tuple(catalog.planner_paths.get(old, (old,)))
        rng = rng_key(old)
        if rng is None or writer is None or tp is None or tp == writer:
            yield old, old, path
            continue
        rank = rng.tp
        for t in range(rank, tp) if rank == writer - 1 else [rank] if rank < tp else []:
            name = f"({rng.pp}, {t})"
            middle = tuple(name if step == f"({rng.pp}, {rank})" else step for step in path)
            yield old, f"rng_state.{name}.{rng.rest}", middle


def _regrouped(source: FsdpSource, writer: int | None, tp: int) -> Iterator[tuple[str, tuple[Source, ...]]]:
    """(stored key, sources) of the fused projections with rows grouped by tensor-parallel rank."""
    packed = packed_projections(tensor.name for tensor in source.tensors)
    if not packed:
        return
    if writer is None:
        raise UsageError(
            f"{packed[0]}: its rows cannot be regrouped for tensor parallel size {tp}, as the size they "
            "are for is unknown: the checkpoint holds no rng states and no record of a conversion. Lay out the "
            "torch_dist checkpoint that this one was made from instead"
        )
    parts: dict[str, list[StoredParameter]] = {}
    for part in stored_parameters(source.tensors, writer, None):
        if part.cuts and "_down_proj." not in part.name:  # every rank has all of MLA's down-projection
            parts.setdefault(part.tensor.name, []).append(part)
    for name, of_tensor in parts.items():
        runs = fused_rows(name, {part.name: part.shape[0] for part in of_tensor}, tp)
        for kind, whole in of_tensor[0].tensor.values.items():
            values = {part.name: part.value(kind) for part in of_tensor}
            rows = [values[run.part].rows(run.start, run.count) for run in runs]
            yield whole.sources[0].key, concat(name, rows).sources


def _notes(regrouped: Mapping[str, object], writer: int | None, tp: int | None) -> Iterator[str]:
    if regrouped:
        yield f"{len(regrouped)} tensors of fused projections regrouped from tensor parallel size {writer} to {tp}"
    if writer is not None and tp is not None and tp > writer:
        yield f"rng of tensor-parallel {_ranks(writer, tp)}: copied from rank {writer - 1}"
    if writer is not None and tp is not None and tp < writer:
        yield f"rng of tensor-parallel {_ranks(tp, writer)}: dropped, the target has no such ranks"


def _ranks(first: int, stop: int) -> str:
    return f"rank {first}" if stop == first + 1 else f"ranks {first} to {stop - 1}"
