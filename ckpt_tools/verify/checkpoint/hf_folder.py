"""Whether a Hugging Face folder is a model: its JSON files can be read, and its tensors are those of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from ckpt_tools.errors import NEVER_FINDINGS, CkptError, MappingError
from ckpt_tools.formats.safetensors import refuse_pointers
from ckpt_tools.formats.storage.files import Files, read_whole
from ckpt_tools.formats.untrusted_documents import parse_json
from ckpt_tools.megatron.huggingface.config.codecs import REQUIRED
from ckpt_tools.megatron.huggingface.config.ledger import short
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.mapping.checks import WITH_HEAD, Spec, refuse_wrapped
from ckpt_tools.megatron.huggingface.mapping.targets import Expected, Superfluous, expected_by_rules
from ckpt_tools.megatron.huggingface.quantization.quantized import dequantized
from ckpt_tools.megatron.huggingface.vision.towers import DTYPES, TEXT, TYPE, Tower, language_tower
from ckpt_tools.megatron.huggingface.vision.vision_language import (
    tower_pairs,
    vision_language,
    vision_language_types,
)
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.verify.report import Check, Findings

CONFIG: Final = "config.json"
_OF_LABELS: Final = ("ForSequenceClassification", "ForTokenClassification")  # one row of the head a label
_OF_OTHER_TASKS: Final = (*_OF_LABELS, "ForQuestionAnswering", "RewardModel")
Prove: TypeAlias = Callable[[Catalog, Sequence[tuple[str, str]]], None]
_MLX: Final = "quantization"
_COUNTS: Final = {
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "intermediate_size", "moe_intermediate_size", "decoder_sparse_step", "num_experts_per_tok", "n_layer", "n_head",
    "n_embd",
}  # fmt: skip
_NONE_OR_MORE: Final = {"num_experts", "num_local_experts", "n_routed_experts", "n_group", "topk_group"}
_REALS: Final = {"rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"}
_LARGEST: Final = 1 << 31
_MAX_BYTES = 256 << 20  # the largest tokenizers have some tens of megabytes


def check_hf_folder(
    files: Files, catalog: Catalog, names: Iterable[str], prove: Prove = lambda *_: None
) -> list[Check]:
    """Whether there are tensors and a config.json that fit, and the files of `names` are JSON objects.

    `prove` reads pairs of tensors that must hold the same bytes.
    """
    found, config = Findings("model", "settings files"), {}
    if not catalog.tensors:
        found.error(files.location, "its weight files hold no tensor at all")
    if not files.exists(CONFIG):
        found.warning(CONFIG, "it is missing, so what the weights are is unknown: no program can load them")
    for name in dict.fromkeys((CONFIG, *names)):
        if not files.exists(name):
            continue
        found.looked_at += 1
        try:
            refuse_pointers(files, [name])
            value = parse_json(read_whole(files, name, _MAX_BYTES))
        except NEVER_FINDINGS:
            raise
        except CkptError as error:
            found.failure(name, error)
            continue
        if not isinstance(value, dict):
            found.error(name, f"it is JSON, but no object: {type(value).__name__}")
        elif not value and name == CONFIG:
            found.error(name, "it is an empty object and tells nothing of the model")
        elif name == CONFIG:
            config = value
    return [
        found.done(),
        *([check_hf_names(files, catalog, config, prove)] if config and catalog.tensors else []),
    ]


def check_hf_names(
    files: Files, catalog: Catalog, config: Mapping[str, Any], prove: Prove = lambda *_: None
) -> Check:
    """Whether every tensor of the model is there with its shape, and none that its class does not have.

    Where no rules say what the class has, a warning says that nothing was compared.
    """
    found, tower = Findings("names", "tensors"), None
    try:
        plain = dequantized(catalog, config, files)
        config, specs = plain.config, plain.specs
        if config.get(TYPE) in vision_language_types():
            tower = language_tower(config, specs)
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        for line in error.told_problems:  # of tensors that contradict config.json, or their names
            is_name = line in catalog.tensors
            found.error(line if is_name else CONFIG, "belongs to no part of the model" if is_name else line)
        if not error.told_problems:
            _not_compared(found, str(error))
        return found.done()
    if tower is not None and not vision_language(config[TYPE]).rules:
        count = f"{len(tower.others)} tensors of other towers than the language model"
        found.warning(CONFIG, f"{count} were not compared: no rules are known of them")
        specs = {name: spec for name, spec in specs.items() if name not in set(tower.others)}
    try:
        expected = _expected(config, specs) if tower is None else _of_towers(config, specs, tower)
    except CkptError as error:
        impossible = list(_impossible(config if tower is None else tower.config))
        for line in impossible:
            found.error(CONFIG, line)
        if not impossible:
            _not_compared(found, str(error))
        return found.done()
    for line in expected.problems:
        found.error(CONFIG, line)
    pairs = _compare(found, specs, expected)
    try:
        prove(plain.catalog, pairs)
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        found.failure(CONFIG, error)
    _compare_types(found, specs, expected, config)
    return found.done()


def _not_compared(found: Findings, why: str) -> None:
    found.warning(CONFIG, f"names, shapes and types of tensors were not compared: {why}")


def _impossible(config: Mapping[str, Any]) -> Iterator[str]:
    """Fields of a family with rules that no model can have, whatever Megatron has modules for."""
    try:
        family = family_of_config(config)
    except MappingError:
        return
    for one in family.fields:
        value = config.get(one.hf, config.get(one.also) if one.also else None)
        if value is None and one.default is REQUIRED and one.hf in _COUNTS:
            yield f"{one.hf} is {'null' if one.hf in config else 'missing'}; a number of 1 or more is expected"
    for name in sorted((_COUNTS | _NONE_OR_MORE) & config.keys()):
        value, least = config[name], int(name in _COUNTS)
        if value is not None and (type(value) is not int or not least <= value < _LARGEST):
            yield f"{name} is {short(value)}; a number of {least} or more is expected"
    for name in sorted(_REALS & config.keys()):
        value = config[name]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or value <= 0
        ):
            yield f"{name} is {short(value)}; a number above 0 is expected"


def _expected(config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Expected:
    """The tensors of a language model; of a class with another head, those of the body."""
    if _MLX in config:
        raise MappingError(f"config.json has {_MLX!r}, an encoding that is not read")
    expected = expected_by_rules(config, specs, may_be_bare=True)
    named = config.get("architectures")
    if not isinstance(named, list) or not named or str(named[0]).endswith(WITH_HEAD):
        return expected
    shapes = {name: shape for name, shape in expected.shapes.items() if name != expected.head}
    architecture = str(named[0])
    if specs.keys().isdisjoint(shapes):
        raise MappingError(f"the rules are of another class than {architecture}")
    inside = {name.partition(".")[0] for name in shapes}
    heads = [name for name in specs if name.partition(".")[0] not in inside and name != expected.head]
    problems = [*expected.problems]
    if architecture.endswith(_OF_LABELS) and "auto_map" not in config:
        labels = config.get("id2label")
        count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
        module = "classifier" if "classifier.weight" in specs else "score"
        shapes[f"{module}.weight"] = (count, expected.hidden_size)
        if not architecture.endswith(_OF_LABELS[0]):
            shapes[f"{module}.bias"] = (count,)
    elif architecture.endswith(_OF_OTHER_TASKS) and not heads:
        problems.append(f"no tensor of the head that a {architecture} has is stored")

    def superfluous(extra: Iterable[str]) -> Superfluous:
        own = [name for name in extra if name.partition(".")[0] not in inside]
        equal, ignored = expected.superfluous(name for name in extra if name not in own)
        return equal, [*ignored, *own]

    head = next(iter(heads), "") if "For" in architecture else ""
    return replace(expected, shapes=shapes, superfluous=superfluous, head=head, problems=problems)


def _of_towers(config: Mapping[str, Any], specs: Mapping[str, Spec], tower: Tower) -> Expected:
    """The tensors of all parts of a vision-language model."""
    named = {name: specs[own] for name, own in tower.names.items()}
    inner = expected_by_rules(tower.config, named, tower.families(FAMILIES))
    pairs = tower_pairs(vision_language(config[TYPE]), config, tower.config, tower.others)
    own = {tower.name_of(name): name for name in (*inner.shapes, *named)}
    shapes = {stored: inner.shapes[name] for stored, name in own.items() if name in inner.shapes}
    for pair in pairs:
        shapes |= {name: one.shape for name, one in zip(pair.hf, pair.tensors, strict=True)}

    def superfluous(extra: Iterable[str]) -> Superfluous:
        equal, ignored = inner.superfluous(own[name] for name in extra if name in own)
        return tuple((tower.name_of(a), tower.name_of(b)) for a, b in equal), [*map(tower.name_of, ignored)]

    types = {tower.name_of(name): dtype for name, dtype in inner.types.items()}
    return replace(inner, shapes=shapes, superfluous=superfluous, types=types)


def _compare(found: Findings, specs: Mapping[str, Spec], expected: Expected) -> list[tuple[str, str]]:
    """What is missing, of another shape, or of no class; of wrapped names one finding.

    Returns pairs of tensors that must hold the same bytes.
    """
    shapes = expected.shapes
    found.looked_at = len(shapes)
    missing = [name for name in shapes if name not in specs]
    extra = [name for name in specs if name not in shapes and 0 not in specs[name].shape]
    try:
        refuse_wrapped(extra, missing)
    except MappingError as error:
        found.failure(CONFIG, error)
        return []
    equal, ignored = expected.superfluous(extra)
    extra = sorted(set(extra) - set(ignored))
    for name in extra:
        if specs[name].dtype not in CASTABLE and f"{name.rpartition('.')[0]}.weight" in missing:
            why = f"{name} is {specs[name].dtype}: codes of an encoding that config.json does not name"
            _not_compared(found, why)
            return []
    wanted = dict(shapes) | {name: shapes[one] for one, name in equal if one in shapes}
    for name in missing:
        found.error(name, f"is missing; config.json asks for {list(shapes[name])}")
    for name, shape in wanted.items():
        if name in specs and specs[name].shape != shape:
            found.error(name, f"has shape {list(specs[name].shape)}; config.json asks for {list(shape)}")
    for name in extra:
        found.error(name, "is of no module of the model that config.json describes")
    if expected.prefix and expected.head in specs:
        found.warning(
            expected.head,
            f"the names of the model inside lack {expected.prefix!r}, which a class with this head saves: "
            "transformers 4 refuses to load the folder, transformers 5 loads it",
        )
    return [(one, other) for one, other in equal if one in specs and specs[one].shape == specs[other].shape]


def _compare_types(
    found: Findings, specs: Mapping[str, Spec], expected: Expected, config: Mapping[str, Any]
) -> None:
    """Weights of another type than config.json says: a warning, since programs cast them as they load."""
    places = [place for place in (config, config.get(TEXT)) if isinstance(place, Mapping)]
    said = next((str(place[key]) for place in places for key in DTYPES if place.get(key)), None)
    others: dict[str, list[str]] = {}
    for name in expected.shapes.keys() & specs.keys():
        dtype = specs[name].dtype
        if dtype not in CASTABLE:
            found.error(name, f"is {dtype}, which no weight can be")
        elif said in CASTABLE and dtype not in (said, expected.types.get(name)):
            others.setdefault(dtype, []).append(name)
    for dtype, names in others.items():
        found.warning(
            min(names),
            f"{len(names)} of {len(specs)} tensors, this the first, are {dtype}; config.json says {said}",
        )
