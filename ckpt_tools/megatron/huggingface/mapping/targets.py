"""A Megatron model as Hugging Face tensors, and back: what each tensor to write is made of.

Both directions expand the family's rules for the model at hand and then account for everything: every
parameter is used by exactly one rule, every tensor of the other side is complete. Anything left over, missing or
of another shape is named, all of it at once, before a byte is written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias

from ckpt_tools.errors import MappingError, UsageError, list_problems
from ckpt_tools.megatron.huggingface.config.config import (
    in_v4_form,
    keep_reference,
    read_config,
    reconcile,
    refuse_quantized,
    write_config,
)
from ckpt_tools.megatron.huggingface.config.ledger import account_for_settings, demanded_args
from ckpt_tools.megatron.huggingface.config.megatron_args import (
    flat_args,
    megatron_args,
    read_model_args,
    with_own_settings,
)
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import (
    detect_family,
    family_of_config,
    naming_look_alikes,
)
from ckpt_tools.megatron.huggingface.mapping.checks import (
    EMBEDDING,
    HEAD,
    Spec,
    contradictions,
    import_notes,
    kept_types,
    loading_notes,
    misfits,
    not_of_family,
    other_heads,
    refuse_wrapped,
    rope_notes,
    semantic_notes,
    shared_notes,
    spellings,
    wider_types,
    with_stored_norms,
    with_vocabulary,
)
from ckpt_tools.megatron.huggingface.mapping.rules import Family, Pair, expand
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Shape, Source

Superfluous: TypeAlias = tuple[tuple[tuple[str, str], ...], list[str]]
"""Pairs of tensors to prove equal, and all tensors without content."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a whole model has; shapes in elements.

    `types` are of tensors that have one type whatever the others have. `superfluous` tells of names that are not
    among `shapes` which may be there all the same. `head` is the one that a class of another task does not have.
    `problems` are settings that contradict each other; `prefix` is the first segment that all names of a model saved
    without its head lack.
    """

    shapes: Mapping[str, Shape]
    told_by: str
    superfluous: Callable[[Iterable[str]], Superfluous]
    types: Mapping[str, str] = field(default_factory=dict)
    head: str = ""
    problems: Sequence[str] = ()
    prefix: str = ""
    hidden_size: int = 0


def expected_by_rules(
    config: Mapping[str, Any],
    present: Collection[str],
    families: Mapping[str, Family] = FAMILIES,
    may_be_bare: bool = False,
) -> Expected:
    """The tensors by the rules of the family; of spellings that a class has saved, the one that is `present`.

    With `may_be_bare` these are of the model inside of a class with a head, if its names are present.
    """
    family = family_of_config(config, families)
    model = read_config(family, config)
    model = replace(model, padded_vocab_size=model.true_vocab_size)
    prefix = bare_prefix(family, present) if may_be_bare else ""
    model = replace(model, mtp_num_layers=prediction_layers(family, model, present, prefix))
    shapes: dict[str, Shape] = {}
    types: dict[str, str] = {}
    for pair in expand(family, model, present):
        named = {name.removeprefix(prefix): one.shape for name, one in pair.named()}
        shapes |= named
        types |= dict.fromkeys(named, pair.rule.dtype) if pair.rule.dtype else {}
    return Expected(
        shapes,
        "config.json",
        lambda extra: without_content(family, model, extra, prefix),
        types,
        tensor_of(family, HEAD),
        contradictions(family, model, config),
        prefix,
        model.hidden_size,
    )


def expected_by_weights(tensors: Mapping[str, Spec], config: Mapping[str, Any]) -> Expected:
    """The tensors of a directory with weights of the same architecture."""
    shapes = {name: one.shape for name, one in tensors.items()}
    embeddings = [name for name in shapes if name.endswith("embed_tokens.weight")]
    tied = config.get("tie_word_embeddings") is True and len(embeddings) == 1

    def superfluous(extra: Iterable[str]) -> Superfluous:
        heads = [name for name in extra if tied and name == "lm_head.weight"]
        return tuple((embeddings[0], head) for head in heads), heads

    return Expected(shapes, "the weights next to config.json", superfluous)


def bare_prefix(family: Family, tensors: Iterable[str]) -> str:
    """The first segment that the names of a directory lack which was saved from a model without its head, or ""."""
    rules = [
        rule for rule in family.rules if not rule.core.startswith("mtp.")
    ]  # may be named outside the model
    names = {name for rule in rules for name in rule.hf} - {tensor_of(family, HEAD)}
    first = {name.split(".")[0] + "." for name in names}
    there = {name.split(".")[0] + "." for name in tensors}
    return "".join(first) if len(first) == 1 and not first & there else ""


def tensor_of(family: Family, core: str) -> str:
    """The tensor that is a parameter; a class without a head may have stored one."""
    return next((rule.hf[0] for rule in family.rules if rule.core == core), "lm_head.weight")


def shared_head(
    config: Mapping[str, Any], tensors: Iterable[str], families: Mapping[str, Family] = FAMILIES
) -> tuple[str, str] | None:
    """The names of the embedding and of the head that is the same weight; None: the head is separate."""
    family = family_of_config(config, families)
    if not read_config(family, config).tied:
        return None
    return tensor_of(family, EMBEDDING).removeprefix(bare_prefix(family, tensors)), tensor_of(family, HEAD)


def without_content(
    family: Family, model: ModelArgs, extra: Iterable[str], prefix: str
) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Pairs to prove equal, and all extra tensors without content."""
    embedding, head = tensor_of(family, EMBEDDING).removeprefix(prefix), tensor_of(family, HEAD)
    same = {head: embedding} if model.tied else {}
    for m in range(model.mtp_num_layers):
        for core, name in family.copies:
            original = embedding if core == EMBEDDING or model.tied else head
            same[name.replace("{n}", str(model.num_layers + m)).removeprefix(prefix)] = original
    extra = sorted(extra)
    equal = tuple((same[name], name) for name in extra if name in same)
    ignored = re.compile("|".join(family.ignored) or "(?!)")
    return equal, [name for name in extra if name in same or ignored.fullmatch(prefix + name)]


def prediction_layers(family: Family, model: ModelArgs, tensors: Collection[str], prefix: str) -> int:
    """How many prediction layers (MTP): as config.json says, or one; 0 if the directory has no tensor of them."""
    said = any(one.arg == "mtp_num_layers" for one in family.fields)
    asked = replace(model, mtp_num_layers=model.mtp_num_layers if said else 1)
    rules = tuple(rule for rule in family.rules if "{m}" in rule.core)
    names = (name for pair in expand(replace(family, rules=rules), asked, tensors) for name in pair.hf)
    return asked.mtp_num_layers if any(name.removeprefix(prefix) in tensors for name in names) else 0


@dataclass(frozen=True, slots=True)
class Exported:
    """What a Hugging Face directory must contain.

    `shapes` are the header's shapes of tensors with split axes in the target (the bytes are the same). `offsets`
    are to be added to all elements of a tensor, in float32 before the one rounding: norms that one side stores as
    weight - 1. Each pair of `equal` must hold the same bytes in the source: a tied head stored nevertheless.
    """

    family: Family
    tensors: tuple[TargetTensor, ...]
    config: Mapping[str, Any]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    offsets: Mapping[str, float] = field(default_factory=dict)
    equal: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def renamed(self, name_of: Callable[[str], str]) -> Exported:
        return replace(
            self,
            tensors=tuple(replace(one, key=name_of(one.key)) for one in self.tensors),
            shapes={name_of(key): shape for key, shape in self.shapes.items()},
            offsets={name_of(key): offset for key, offset in self.offsets.items()},
        )


@dataclass(frozen=True, slots=True)
class Imported:
    """Megatron parameters made from a Hugging Face directory, one per layer and expert; `offsets` as of an export.

    Views of `tensors` see a source tensor named in `shapes` with that shape instead of its header's.
    """

    family: Family
    tensors: tuple[TargetTensor, ...]
    args: Mapping[str, Any]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    offsets: Mapping[str, float] = field(default_factory=dict)
    equal: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def export_targets(
    parameters: Mapping[str, Spec],
    args: Mapping[str, Any] | None,
    reference: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    vocab_size: int | None = None,
    mtp_copies: bool = False,
    families: Mapping[str, Family] = FAMILIES,
    present: Iterable[str] = (),
) -> Exported:
    """The Hugging Face tensors and config.json of a model.

    `parameters` has the model's parameters under `torch_dist` names with layers and experts written one by one
    (rules.py). `args` are Megatron-LM's or Bridge's settings; `reference`, a config.json, supplies what they
    cannot tell and must agree with the rest. `dtype` None keeps every tensor's own. `vocab_size` cuts the
    vocabulary; `mtp_copies` repeats embedding and head in each prediction layer, as DeepSeek's release does.
    `present` are the tensors of a directory to compare with: names and stacked experts are as they are there.
    """
    if args is None and reference is None:
        raise MappingError("the checkpoint holds no args; pass --hf-config with the model's config.json")
    model = with_stored_norms(read_model_args(args), parameters) if args is not None else None
    vocabulary = vocab_size or (model.vocab_size if model is not None else None)
    family = detect_family(parameters, model, reference, families)
    if model is not None and args is not None:
        model = with_own_settings(model, family.settings, args)
    told_by_names = reference is None and families is FAMILIES
    with naming_look_alikes(told_by_names, parameters, args, model):
        settings = account_for_settings(
            family, model, args, None if reference is None else in_v4_form(reference)
        )
    if reference is not None:
        model = read_config(family, reference) if model is None else reconcile(family, model, reference)
    assert model is not None  # one of the two is given
    model, notes = with_vocabulary(model, parameters, vocabulary)
    pairs = expand(family, model, present)
    with naming_look_alikes(told_by_names, parameters, args, model):
        spelled, equal = _whole(family, model, pairs, parameters, reference)
    tensors = [target for pair in pairs for target in export_pair(pair, spelled, parameters, dtype)]
    shapes = {key: one.shape for pair in pairs for key, one in pair.named() if one.shape != one.seen}
    offsets = {key: step for pair in pairs if (step := _offset(family, model, pair)) for key in pair.hf}
    if mtp_copies:
        made = {target.sources[0].key: target for target in tensors}
        tensors += [
            replace(made[core], key=name.replace("{n}", str(model.num_layers + m)))
            for m in range(model.mtp_num_layers)
            for core, name in family.copies
            if core in made
        ]
    model = replace(model, params_dtype=bulk_dtype(tensors))
    config = dict.fromkeys(family.unset) | (keep_reference(family, reference) if reference else {})
    config |= write_config(family, model)
    scaling = config.get("rope_scaling")
    if scaling and "type" in ((reference or {}).get("rope_scaling") or {}):
        # The model's own code (`auto_map`) may go by the older word alone, as DeepSeek's does.
        config["rope_scaling"] = {"type": scaling["rope_type"], **scaling}
    if reference and reference.get("model_type") in family.also_types:
        config["model_type"] = reference["model_type"]
    if args is None:
        notes = (*notes, "the checkpoint holds no args: what its numbers mean is taken from --hf-config")
    elif flat_args(args).get("qk_layernorm") is False and model.qk_layernorm and not family.published:
        notes = (*notes, "qk_layernorm is False in the args, but q_layernorm is stored, and exported")
    types = ((pair.core[0], parameters[spelled[pair.core[0]]].dtype, pair.rule.dtype) for pair in pairs)
    notes = (*notes, *kept_types(types), *semantic_notes(family, model), *shared_notes(family, model))
    notes = (*settings, *notes, *rope_notes(args, model), *loading_notes(family, reference or {}))
    exported = Exported(family, tuple(tensors), config, shapes, offsets, equal, notes)
    prefix = bare_prefix(family, present) if present else ""
    return exported.renamed(lambda name: name.removeprefix(prefix)) if prefix else exported


def _whole(
    family: Family,
    model: ModelArgs,
    pairs: Sequence[Pair],
    parameters: Mapping[str, Spec],
    reference: Mapping[str, Any] | None,
) -> tuple[Mapping[str, str], tuple[tuple[str, str], ...]]:
    """How the checkpoint spells what `pairs` take of it, and pairs of names that must hold the same."""
    problems = not_of_family(family, model, reference)
    spelled, unused = spellings(pairs, parameters, problems)
    equal: tuple[tuple[str, str], ...] = ()
    if model.tied and HEAD in unused and parameters[HEAD] == parameters[EMBEDDING]:
        unused.remove(HEAD)  # a stored head of a tied model, once it is proven to be the embedding
        equal = ((EMBEDDING, HEAD),)
    problems += [f"{name}: no rule of {family.name} has this parameter" for name in unused]
    if problems:
        how = "by config.json" if reference else "by its parameters; --hf-config or --rules can say otherwise"
        of = f", a HybridModel of layers {model.hybrid_pattern!r}," if model.hybrid_pattern else ""
        way_out = (
            "\nWhat it is whole without: --ignore-keys GLOB leaves it out (diff: --ignore)" if unused else ""
        )
        raise MappingError(
            f"the checkpoint{of} is not a whole {family.name} model (detected {how}):\n"
            + list_problems(problems)
            + way_out,
            problems,
        )
    return spelled, equal


def import_targets(
    tensors: Mapping[str, Spec],
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    vocab_multiple: int = 1,
    vocab_rows: int | None = None,
    families: Mapping[str, Family] = FAMILIES,
) -> Imported:
    """The Megatron parameters and args of a Hugging Face directory.

    `tensors` are its tensors, `config` its config.json. The vocabulary is filled up with zeros to `vocab_rows`, or to
    a multiple of `vocab_multiple` (make-vocab-size-divisible-by times tensor-parallel size). `dtype` None keeps each
    tensor's own.
    """
    refuse_quantized(config)
    family = family_of_config(config, families)
    model = read_config(family, config)
    settings = account_for_settings(family, model, None, in_v4_form(config))
    rows = vocab_rows or -(-model.true_vocab_size // vocab_multiple) * vocab_multiple
    if rows < model.true_vocab_size:
        raise UsageError(
            f"--vocab-size-padded {rows} is less than the {model.true_vocab_size} tokens of the vocabulary"
        )
    model = replace(model, padded_vocab_size=rows)
    prefix = bare_prefix(family, tensors)
    layers = prediction_layers(family, model, tensors, prefix)
    said, model = model.mtp_num_layers, replace(model, mtp_num_layers=layers)
    notes = (*settings, *import_notes(family, model), *loading_notes(family, config))
    if said and not layers:
        notes += (
            "config.json names prediction layers (MTP), the files hold none; Megatron's args name none then",
        )
    pairs = expand(family, model, tensors)
    wanted, misfitting = misfits(pairs, tensors, prefix)
    extra = set(tensors) - wanted
    refuse_wrapped(extra, (name for name in wanted if name not in tensors))
    problems = [*not_of_family(family, model, config), *misfitting]
    equal, ignored = without_content(family, model, extra, prefix)
    ignored += [name for name in sorted(extra - set(ignored)) if 0 in tensors[name].shape]
    rest = extra - set(ignored)
    if heads := other_heads(rest, wanted, tensors, model.hidden_size):
        rest -= set(heads)
        missing = f"{tensor_of(family, HEAD)} "
        problems = [one for one in problems if not one.startswith(missing)]
        problems.append(
            f"{', '.join(f'{name} {list(tensors[name].shape)}' for name in heads)}: the head of a reward, value or "
            f"classification model (architectures: {config.get('architectures')!r:.80}). Megatron's GPTModel "
            "predicts tokens and has no such head: import the language model that this one was made of, or save the "
            "one inside (of TRL `model.pretrained_model.save_pretrained(DIR)`)"
        )
    problems += [f"{name}: no rule of {family.name} has this tensor" for name in sorted(rest)]
    if problems:
        raise MappingError(
            f"the directory is not a whole {family.name} model:\n" + list_problems(problems), problems
        )
    made = [target for pair in pairs for target in import_pair(model, pair, prefix, tensors, dtype)]
    firsts = ((pair.hf[0].removeprefix(prefix), pair.rule.dtype) for pair in pairs)
    notes = (*notes, *kept_types((name, tensors[name].dtype, dtype) for name, dtype in firsts))
    bulk = bulk_dtype(made)
    own = {name for pair in pairs if pair.rule.dtype is not None for name in pair.core}
    notes = (*notes, *wider_types(((one.key, one.dtype) for one in made if one.key not in own), bulk))
    args = megatron_args(replace(model, params_dtype=bulk)) | demanded_args(family)
    shapes = {
        name.removeprefix(prefix): one.seen
        for pair in pairs
        for name, one in pair.named()
        if one.seen != one.shape
    }
    offsets = {name: -step for pair in pairs if (step := _offset(family, model, pair)) for name in pair.core}
    return Imported(family, tuple(made), args, shapes, offsets, equal, tuple(ignored), notes)


def _offset(family: Family, model: ModelArgs, pair: Pair) -> float:
    """What is to be added to a norm of the Megatron side that the other side's class takes otherwise."""
    plus_one = family.plus_one and not pair.rule.plain
    if not pair.rule.norm or model.zero_centered_gamma == plus_one:
        return 0.0
    return 1.0 if model.zero_centered_gamma else -1.0


def export_pair(
    pair: Pair, spelled: Mapping[str, str], parameters: Mapping[str, Spec], dtype: str | None
) -> list[TargetTensor]:
    stored = {parameters[spelled[name]].dtype for name in pair.core}
    if len(stored) > 1:
        raise MappingError(
            f"{pair.core[0]} and what is one tensor with it are stored as {' and '.join(sorted(stored))}"
        )
    sources: list[list[Source]] = [[] for _ in pair.hf]
    for name, layout in zip(pair.core, pair.layouts, strict=True):
        for link in layout.links:
            view = link.to_hf(pair.tensors[link.hf].seen)
            sources[link.hf].append(Source(spelled[name], view))
    chosen = pair.rule.dtype or dtype or stored.pop()
    return [
        TargetTensor(key, chosen, shape.seen, tuple(found))
        for (key, shape), found in zip(pair.named(), sources, strict=True)
    ]


def import_pair(
    model: ModelArgs,
    pair: Pair,
    prefix: str,
    tensors: Mapping[str, Spec],
    dtype: str | None,
) -> Iterable[TargetTensor]:
    hf = [name.removeprefix(prefix) for name in pair.hf]
    stored = {tensors[name].dtype for name in hf}
    if len(stored) > 1:
        raise MappingError(f"{' and '.join(hf)} become one parameter, but are {' and '.join(sorted(stored))}")
    for name, shape, layout in zip(pair.core, pair.shapes, pair.layouts, strict=True):
        yield TargetTensor(
            name,
            pair.rule.dtype or dtype or next(iter(stored)),
            shape,
            tuple(Source(hf[link.hf], link.to_core(shape)) for link in layout.links),
            zero_filled=pair.rule.layout == "vocab" and shape[0] > model.true_vocab_size,
        )


def bulk_dtype(tensors: Iterable[TargetTensor | Spec]) -> str:
    """The type of most elements: what config.json and the args call the model's type."""
    elements: Counter[str] = Counter()
    for target in tensors:
        elements[target.dtype] += prod(target.shape)
    return elements.most_common(1)[0][0]
