"""From a `Model` to the `Target` of its `fsdp_dtensor` checkpoint: all decisions, no bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_tools.errors import MappingError, UsageError, list_problems
from ckpt_tools.megatron.fsdp_dtensor.common_part import (
    Part,
    common_part,
    dialect_notes,
    renamed,
)
from ckpt_tools.megatron.fsdp_dtensor.gating import GatingChoice, mark_gated
from ckpt_tools.megatron.fsdp_dtensor.kept import other_states
from ckpt_tools.megatron.fsdp_dtensor.live import LiveParameter, live_parameters
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.tensors import (
    Prefixes,
    backfill_groups,
    check_states,
    deferred_models,
    deferred_states,
    group_objects,
    roles_of,
    state_prefix,
    step_tensors,
)
from ckpt_tools.megatron.hybrid import is_hybrid
from ckpt_tools.megatron.keys import EXPERTS
from ckpt_tools.megatron.names import (
    BRIDGE,
    MTP_LIVE,
    Dialect,
    ModelStyle,
    dialect_for,
)
from ckpt_tools.megatron.param_groups import Membership, derive_memberships, merge_map, rules_from_args
from ckpt_tools.megatron.run_state.record import Size
from ckpt_tools.megatron.torch_dist.optimizer_layouts.expected import expected_states, refuse_missing_states
from ckpt_tools.megatron.torch_dist.other_optimizers import mixes_lion_and_adam
from ckpt_tools.megatron.torch_dist.slices import layer_counts
from ckpt_tools.megatron.vocab import VocabChange, Vocabulary, resize_vocab, told_tokens, vocabulary
from ckpt_tools.model.deferred import Deferred
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.model import Model, unread_note
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import Target, TargetObject


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
        """Names of the parameters whose rows are in an order that only one tensor-parallel size has."""
        return tuple(p.name for p in self.parameters if p.is_packed)


def build_fsdp_target(model: Model, options: TargetOptions) -> FsdpTarget:
    """Everything the `fsdp_dtensor` checkpoint of `model` must contain."""
    check_options(options)
    dialect = choose_dialect(model, options)
    style, notes = choose_style(model, options)
    tp = options.tp or writer_tp(model).ranks
    parameters = choose_parameters(model, options, style, dialect, tp)
    notes += dialect_notes(parameters, model, dialect, options)
    vocab = choose_vocab(model, options, parameters)
    parameters = vocab.parameters
    prefixes = Prefixes(options.model_prefix, options.state_prefix or state_prefix(model))
    weights = deferred_models(parameters, prefixes.model, options.dtype)
    optimizer = optimizer_part(model, options, parameters, prefixes)
    common = common_part(model, options, dialect, tp)
    tensors = Deferred(weights, optimizer.tensors)
    target = Target(
        tensors=tensors,
        inline=(*optimizer.inline, *common.inline),
        objects=Deferred(optimizer.objects, common.objects),
        dropped=(*model.dropped, *optimizer.dropped, *common.dropped),
        renamed=renamed(parameters),
        backfilled=optimizer.backfilled,
        notes=(*unread_note(model), *model.notes, *notes, *vocab.notes, *optimizer.notes, *common.notes),
    )
    return FsdpTarget(
        target,
        tuple(parameters),
        optimizer.memberships,
        dialect,
        style,
        vocab,
        *known_vocabulary(model, options, parameters),
    )


def known_vocabulary(
    model: Model, options: TargetOptions, parameters: Sequence[LiveParameter]
) -> tuple[Vocabulary | None, int | None]:
    """The vocabulary of the target, and how many of its rows are tokens where that is known."""
    args = model.common.args or model.common.model_config
    told = told_tokens(args)
    rows = vocabulary(((p.name, p.shape) for p in parameters), args, options.vocab_size)
    return rows, options.vocab_size or (told[0] if len(told) == 1 else None)


def trained_parameters(
    model: Model, options: TargetOptions, parameters: Sequence[LiveParameter]
) -> list[LiveParameter] | None:
    """Those with optimizer states, which are whole; None where no optimizer is written."""
    if options.weights_only:
        return None
    if model.optimizer_layout is not None or model.groups:
        refuse_missing_states(model.roles, expected_states(model.common, model.groups))
    if model.optimizer_layout is None:
        return None
    trained = [p for p in parameters if roles_of(p)]
    check_states(trained, MASTER in model.roles, mixes_lion_and_adam(model.common))
    return trained


def optimizer_part(
    model: Model, options: TargetOptions, parameters: Sequence[LiveParameter], prefixes: Prefixes
) -> Part:
    """States, steps and group fields of every trainable parameter; nothing for a conversion of weights."""
    trainable = trained_parameters(model, options, parameters)
    if trainable is None:
        return Part()
    if model.own_optimizer is not None:
        dropped, reasons = other_states(model, trainable)
        return Part(dropped=dropped, notes=reasons)
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
    inline = list(step_tensors(trainable, memberships, groups, prefixes))
    objects: Sequence[TargetObject] = group_objects(trainable, memberships, groups, prefixes)
    return Part(
        tensors=deferred_states(trainable, prefixes),
        inline=tuple(inline),
        objects=objects,
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
    if options.dtype is not None and options.dtype not in CASTABLE:
        raise UsageError(f"--dtype {options.dtype}: weights can be written as {', '.join(sorted(CASTABLE))}")
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


def choose_style(model: Model, options: TargetOptions) -> tuple[ModelStyle, list[str]]:
    """The facts of the model that names depend on, and a note for each that was assumed."""
    settings, notes = model.settings, []
    names = {p.name for p in model.parameters}
    has_fused_norms = any(name.endswith((".linear_qkv.layer_norm_weight", ".linear_fc1.layer_norm_weight"))
                          for name in names)  # fmt: skip
    hybrid = settings.hybrid or is_hybrid(names)
    if hybrid and options.layer_spec == "local":
        raise MappingError(
            "--layer-spec local: a HybridModel has Transformer Engine's layers whatever its args say"
        )
    local = options.layer_spec == "local" if options.layer_spec else settings.local_norms
    if hybrid:
        local = False
    if local is None:
        local = False
        if has_fused_norms:
            notes.append(
                "layer spec: no args name it; Transformer Engine's names are used (--layer-spec local)"
            )
    grouped = options.experts == "grouped" if options.experts else settings.grouped_experts
    if grouped is None:
        if any(EXPERTS in name for name in names):
            raise MappingError(
                "the model has experts, and no args say whether the loading job holds them in one grouped module "
                "or in a module each; pass --experts grouped (--moe-grouped-gemm) or --experts sequential"
            )
        grouped = False
    return ModelStyle(local, grouped, settings.fused_mla_down), notes


def choose_parameters(
    model: Model, options: TargetOptions, style: ModelStyle, dialect: Dialect, tp: int, halves: bool = True
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
    found = layer_counts(p.name for p in model.parameters).get("decoder.layers.")
    if found is not None and model.settings.num_layers not in (None, found):
        problems.append(
            f"the args say num_layers = {model.settings.num_layers}, the weights have {found} layers"
        )
    if problems:
        raise MappingError(
            "the weights contradict each other or the args:\n" + list_problems(problems), problems
        )
    return parameters


def choose_vocab(model: Model, options: TargetOptions, parameters: list[LiveParameter]) -> VocabChange:
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
    told = max(told_tokens(model.common.args or model.common.model_config), default=None)
    if options.vocab_size is not None or told is None or rows < told:
        return resize_vocab(parameters, rows, options.vocab_size)
    change = resize_vocab(parameters, rows, told)
    return replace(change, notes=(*change.notes, f"vocabulary: {told} tokens, as the source's args tell"))


def choose_memberships(
    model: Model, options: TargetOptions, trainable: Sequence[LiveParameter]
) -> tuple[dict[str, Membership], list[str]]:
    """Every trainable parameter's group: derived, a given map put over it; and notes."""
    rules = rules_from_args(model.common.args, model.groups)
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
