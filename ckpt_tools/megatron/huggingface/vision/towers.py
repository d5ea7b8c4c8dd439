"""The language model inside a vision-language model, as a separate model, and put back.

A tower is found by config.json's `text_config` and the prefix of its tensors' names, of which three are in use::

    model.language_model.layers.0...   lm_head.weight                  as transformers has the modules
    language_model.model.layers.0...   language_model.lm_head.weight   files of Gemma 3 and Mistral 3
    model.layers.0...                  lm_head.weight                  files of Qwen2.5-VL, next to `visual.`

For tokens of text alone, multimodal rotary embedding (M-RoPE) gives each of its sections the same position, and is
the plain one: what it says beyond that stays in config.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.huggingface.config.megatron_args import as_text, flat_args
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, Families
from ckpt_tools.megatron.huggingface.mapping.checks import EMBEDDING, Spec, misfits, spellings
from ckpt_tools.megatron.huggingface.mapping.rules import SMALLEST, Family
from ckpt_tools.megatron.huggingface.mapping.targets import (
    Exported,
    Imported,
    export_pair,
    import_pair,
)
from ckpt_tools.megatron.huggingface.vision.vision_language import (
    VISION,
    VisionLanguage,
    tower_pairs,
    vision_language,
    vision_language_types,
)

EMBED_TOKENS, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of a separate language model
TEXT, QUANTIZED, TIED, TYPE = "text_config", "quantization_config", "tie_word_embeddings", "model_type"
EXPERTS_OF = "qwen3_vl_moe_text"
GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"
MROPE = ("mrope_section", "mrope_interleaved")
ROPES = ("rope_scaling", "rope_parameters")
DTYPES = ("torch_dtype", "dtype")


class Spelling(NamedTuple):
    prefix: str  # before `layers.`; `model.` in a separate language model
    head: str


SPELLINGS = (
    Spelling("model.language_model.", HEAD),
    Spelling("language_model.model.", f"language_model.{HEAD}"),
    Spelling("model.", HEAD),
)


@dataclass(frozen=True, slots=True)
class Tower:
    """The language model inside: its config.json, and its tensors' names by those of a separate model.

    `others` are the tensors of the other towers. `by_rows`: transformers 5 stores experts as it holds them, with the
    rows of a linear first; files of transformers 4 have the columns first.
    """

    config: Mapping[str, Any]
    spelling: Spelling
    names: Mapping[str, str]
    others: tuple[str, ...]
    by_rows: bool = False

    def name_of(self, name: str) -> str:
        if name == HEAD:
            return self.spelling.head
        return self.spelling.prefix + name.removeprefix("model.")

    def families(self, known: Mapping[str, Family]) -> Mapping[str, Family]:
        """The families with experts as this directory has them."""
        if not self.by_rows or not isinstance(known, Families) or known.own is not None:
            return known
        family = FAMILIES[EXPERTS_OF]
        rules = tuple(replace(r, layout="same") if r.layout == "transposed" else r for r in family.rules)
        return Families(replace(family, rules=rules))


def vision_language_of(config: Mapping[str, Any]) -> VisionLanguage:
    kind = config.get(TYPE)
    if kind not in vision_language_types():
        raise MappingError(
            f"config.json has model_type {kind!r}; the vision-language models that are known are "
            f"{', '.join(vision_language_types())}"
        )
    return vision_language(str(kind))


def language_tower(config: Mapping[str, Any], tensors: Mapping[str, Spec], tied: bool | None = None) -> Tower:
    """The language model inside the vision-language model that config.json describes.

    Args:
        tensors: those of its directory; without any, names are those of the released files.
        tied: whether the head of the checkpoint is the embedding, where the tensors are not there to tell.
    """
    wrapper = vision_language_of(config)
    kind = wrapper.name
    text = _text(config, wrapper)
    if text.get(TYPE) != wrapper.language:
        raise MappingError(
            f"the language model inside a {kind} is {wrapper.language}, text_config has model_type "
            f"{text.get(TYPE)!r}"
        )
    spelling = _spelling(tensors, wrapper)
    names = {
        HEAD if name == spelling.head else "model." + name.removeprefix(spelling.prefix): name
        for name in tensors
        if _is_inside(name, spelling, wrapper)
    }
    rest = [name for name in tensors if not _is_inside(name, spelling, wrapper)]
    strange = [name for name in rest if not _is_of(name, wrapper)]
    if strange:
        raise MappingError(
            f"{len(strange)} tensors belong neither to the language model ({spelling.prefix}) nor to the other "
            f"modules of a {kind} ({', '.join(wrapper.modules)}):\n{list_problems(strange)}",
            strange,
        )
    is_tied = _is_tied(config, text, HEAD in names) if tied is None else _as_stored(config, text, tied)
    text = {key: value for key, value in text.items() if key != TIED}
    if is_tied is not None:
        text[TIED] = is_tied
    by_rows = text[TYPE] == EXPERTS_OF and _is_by_rows(
        text, {name: tensors[own] for name, own in names.items()}
    )
    for name in ROPES:  # the rotary embedding that text alone has
        if isinstance(text.get(name), Mapping):
            kept = {key: value for key, value in text[name].items() if key not in MROPE}
            text[name] = {key: "default" if value == "mrope" else value for key, value in kept.items()}
    return Tower(text, spelling, names, tuple(rest), by_rows)


def absent_modules(config: Mapping[str, Any], tower: Tower) -> tuple[str, ...]:
    """The other modules of the whole model of which there is no tensor."""
    there = {_module(name) for name in tower.others}
    return tuple(name for name in vision_language_of(config).modules if name not in there)


def left_out_notes(tower: Tower) -> tuple[str, ...]:
    """What an import says of the rest of the model, and of positions."""
    counts: dict[str, int] = {}
    for name in tower.others:
        counts[_module(name)] = counts.get(_module(name), 0) + 1
    parts = ", ".join(f"{count} of {module}" for module, count in sorted(counts.items())) or "none"
    return (f"the language model alone: {len(tower.others)} tensors of other towers are left out ({parts})",)


def mrope_section(config: Mapping[str, Any]) -> Any:
    """The sections of multimodal positions, None without."""
    text = config.get(TEXT) or config
    ropes = [text.get(name) for name in ROPES]
    sections = (rope.get("mrope_section") for rope in ropes if isinstance(rope, Mapping))
    return next((one for one in sections if one is not None), None)


def mrope_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    section = mrope_section(config)
    if section is None:
        return ()
    return (
        f"positions of text alone: M-RoPE (sections {section}) is the plain rotary embedding there, and the "
        "checkpoint says rope",
    )


def whole_config(config: Mapping[str, Any], tower: Tower, exported: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the whole model for a language model that `exported` describes.

    That is the one there was, but for what a checkpoint may say otherwise: the size of the vocabulary, and the type.
    """
    dtype = next((tower.config[key] for key in DTYPES if key in tower.config), None)
    said = {"vocab_size": tower.config.get("vocab_size"), **dict.fromkeys(DTYPES, dtype)}
    now = {"vocab_size": exported["vocab_size"], **dict.fromkeys(DTYPES, exported["torch_dtype"])}
    found = {
        name: value for name, value in config.items() if name != QUANTIZED
    }  # that of the reference's weights
    text = found if config.get(TEXT) is None else dict(config[TEXT])
    if text is not found:
        found[TEXT] = text
    changed = {key: value for key, value in now.items() if value != said[key]}
    for place in (found, text):  # some fields are repeated outside
        place |= {key: value for key, value in changed.items() if key in place}
    if "vocab_size" in changed:  # which may have been the class's own
        text["vocab_size"] = changed["vocab_size"]
    if not tower.names:  # no directory's weights go by it, and releases of transformers ask in either place
        found[TIED] = text[TIED] = tower.config[TIED]
    return found


def _text(config: Mapping[str, Any], wrapper: VisionLanguage) -> dict[str, Any]:
    """The language model's config.json."""
    text = config.get(TEXT)
    if isinstance(text, Mapping):
        found = {TYPE: wrapper.language, **wrapper.defaults, **text}
    elif wrapper.flat and text is None:
        others = {VISION, "image_token_id", "video_token_id", "vision_start_token_id",
                  "vision_end_token_id", "vision_token_id"}  # fmt: skip
        found = {key: value for key, value in config.items() if key not in others} | {TYPE: wrapper.language}
    else:
        raise MappingError(f"config.json of a {config.get(TYPE)} has no {TEXT}")
    if config.get(QUANTIZED):
        found[QUANTIZED] = config[QUANTIZED]
    if not found.keys() & set(DTYPES):
        found["torch_dtype"] = next((config[key] for key in DTYPES if config.get(key) is not None), None)
    return found


def _spelling(tensors: Mapping[str, Spec], wrapper: VisionLanguage) -> Spelling:
    for one in SPELLINGS:
        if not tensors and one.prefix == wrapper.spelling:
            return one
        if one.prefix + EMBED_TOKENS.removeprefix("model.") in tensors:
            return one
    tried = ", ".join(one.prefix + EMBED_TOKENS.removeprefix("model.") for one in SPELLINGS)
    problem = f"no tensor is the embedding of a language model; expected one of {tried}"
    raise MappingError(problem, [problem])


def _module(name: str) -> str:
    """The module next to the language model that a tensor belongs to."""
    return name.removeprefix("model.").partition(".")[0]


def _is_of(name: str, wrapper: VisionLanguage) -> bool:
    return _module(name) in wrapper.modules


def _is_inside(name: str, spelling: Spelling, wrapper: VisionLanguage) -> bool:
    return name == spelling.head or (name.startswith(spelling.prefix) and not _is_of(name, wrapper))


def _is_tied(config: Mapping[str, Any], text: Mapping[str, Any], has_head: bool) -> bool | None:
    """Whether the head is the embedding; None: as the class of the language model has it.

    Versions of transformers say it outside of text_config, inside, or nowhere; a default of theirs inside may
    contradict what holds. So a stored head stays one unless nothing denies that it is shared. Without a head, a model
    shares it where one place says so.
    """
    outer, inner = config.get(TIED), text.get(TIED) if config.get(TEXT) else None
    if has_head:
        return True in (outer, inner) and False not in (outer, inner)
    if outer is False and inner is True:
        raise MappingError(
            f"config.json has {TIED} false, and true in {TEXT}, and there is no {HEAD}: releases of transformers "
            "would make it the embedding or a new one"
        )
    return True if True in (outer, inner) else False if False in (outer, inner) else None


def _as_stored(config: Mapping[str, Any], text: Mapping[str, Any], tied: bool) -> bool:
    """`tied`, which the checkpoint tells."""
    outer, inner = config.get(TIED), text.get(TIED) if config.get(TEXT) else None
    said = inner if outer is None else outer
    if said is not None and bool(said) != tied:
        raise MappingError(
            f"config.json has {TIED} {str(bool(said)).lower()}, and the checkpoint "
            + ("shares its output layer with the embedding" if tied else "has a separate output layer")
        )
    return tied


def _is_by_rows(text: Mapping[str, Any], tensors: Mapping[str, Spec]) -> bool:
    """Whether experts are stored with the rows of a linear first, which most of them fit.

    At most one of the two tensors of a layer is square and fits either, and the other tells.
    """
    hidden, ffn = text.get("hidden_size"), text.get("moe_intermediate_size")
    if not isinstance(hidden, int) or not isinstance(ffn, int):
        raise MappingError(f"text_config has hidden_size {hidden!r} and moe_intermediate_size {ffn!r}")
    stored = [
        (spec.shape[1:], shape)
        for name, spec in tensors.items()
        for suffix, shape in ((GATE_UP, (2 * ffn, hidden)), (DOWN, (hidden, ffn)))
        if name.endswith(suffix)
    ]
    return sum(found == shape for found, shape in stored) > sum(
        found == shape[::-1] for found, shape in stored
    )


RECORD = "hf_config"


def record_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The argument that records a config.json; without how its weights were quantized, which the run's are not."""
    return {RECORD: {name: value for name, value in config.items() if name != QUANTIZED}}


def recorded_config(settings: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return _configuration(flat_args(settings or {}).get(RECORD))


def changed_record(
    settings: Mapping[str, Any], part: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """The settings that record a config.json, with changes to the fields of `text_config` or `vision_config`."""
    changed = {}
    for name in (RECORD, part):
        fields = _configuration(settings.get(name))
        if fields is None:
            continue
        inside = fields.get(part) if name == RECORD else None
        new = {part: {**inside, **change(inside)}} if isinstance(inside, Mapping) else change(fields)
        own = settings[name]
        changed[name] = own | ({"config_dict": {**fields, **new}} if "config_dict" in own else new)
    return changed


def _configuration(value: Any) -> Mapping[str, Any] | None:
    """A configuration, plain or as Bridge writes one of transformers."""
    if not isinstance(value, Mapping):
        return None
    inside = value.get("config_dict")
    if isinstance(inside, Mapping):
        return inside
    return {name: one for name, one in value.items() if name not in ("_target_", "_call_", "_partial_")}


LANGUAGE = "language_model."
POSITIONS, SECTION = "position_embedding_type", "mrope_section"


def language_prefix(names: Iterable[str]) -> str:
    """The prefix of the language model's parameters in a model of several parts; "" in a separate one."""
    end = f"{LANGUAGE}{EMBEDDING}"
    return next((name.removesuffix(EMBEDDING) for name in names if f".{name}".endswith(f".{end}")), "")


def counted(names: Iterable[str]) -> str:
    """How many parameters there are of each module: `19 of vision_model, 2 of vision_projection`."""
    counts = Counter(name.partition(".")[0] for name in names)
    return ", ".join(f"{count} of {module}" for module, count in sorted(counts.items()))


def language_settings(args: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of the language model alone, for text.

    Positions of text are the same in every section of M-RoPE, and no image is there to be seen without a mask.
    """
    found = {**args, "is_vision_language": False}
    if as_text(args.get(POSITIONS)) != "mrope":
        return found
    wanted, said = None if config is None else mrope_section(config), args.get(SECTION)
    if wanted and said and list(wanted) != list(said):
        raise MappingError(f"{SECTION}: the checkpoint has {list(said)}, config.json {list(wanted)}")
    return found | {POSITIONS: "rope"}


def with_towers(
    exported: Exported,
    config: Mapping[str, Any],
    tower: Tower,
    parameters: Mapping[str, Spec],
    dtype: str | None,
) -> Exported:
    """The export of a language model with the tensors of the other modules; `parameters` are theirs."""
    kind = known_to_bridge(config)
    pairs = tower_pairs(kind, config, tower.config, tower.others)
    problems: list[str] = []
    spelled, unused = spellings(pairs, parameters, problems)
    problems += [f"{name}: no rule of {kind.name} has this parameter" for name in unused]
    _refuse(problems, f"the checkpoint is not a whole {kind.name} model (detected by config.json)")
    made = [target for pair in pairs for target in export_pair(pair, spelled, parameters, dtype)]
    return replace(
        exported,
        family=replace(exported.family, architecture=kind.architecture),
        tensors=(*exported.tensors, *made),
    )


def imported_whole(
    imported: Imported,
    config: Mapping[str, Any],
    tower: Tower,
    tensors: Mapping[str, Spec],
    dtype: str | None,
) -> Imported:
    """The import of a language model among the parameters of the other modules, made of `tensors`.

    Its arguments record `config`, which tells what the tensors do not.
    """
    kind = known_to_bridge(config)
    pairs = tower_pairs(kind, config, tower.config, tower.others)
    there = {name: tensors[name] for name in tower.others}
    wanted, problems = misfits(pairs, there)
    problems += [f"{name}: no rule of {kind.name} has this tensor" for name in there if name not in wanted]
    _refuse(problems, f"the directory is not a whole {kind.name} model")
    positions, notes = _positions(config, imported.args)
    made = [target for pair in pairs for target in import_pair(SMALLEST, pair, "", there, dtype)]
    language = [replace(target, key=LANGUAGE + target.key) for target in imported.tensors]
    return replace(
        imported,
        family=replace(imported.family, architecture=kind.architecture),
        tensors=(*language, *made),
        offsets={LANGUAGE + key: offset for key, offset in imported.offsets.items()},
        args={**imported.args, **positions, **record_of(config)},
        notes=(*imported.notes, *notes),
    )


def known_to_bridge(config: Mapping[str, Any]) -> VisionLanguage:
    kind = vision_language_of(config)
    if not kind.rules:
        raise MappingError(
            f"config.json has model_type {kind.name!r}, a vision-language model that Megatron-Bridge has no model "
            "for: nothing names its vision tower. The language model alone is converted, by --tower language"
        )
    return kind


def _positions(config: Mapping[str, Any], args: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of multimodal positions, where config.json has them, and a note where they cannot be said."""
    section = mrope_section(config)
    if not section:
        return {}, ()
    if args[POSITIONS] != "rope":
        return {}, (
            f"Megatron's arguments have no {args[POSITIONS]} of M-RoPE (sections {list(section)}): they say that of "
            "text. Megatron-Bridge's Qwen3-VL takes its rotary embedding from config.json",
        )
    return {POSITIONS: "mrope", SECTION: list(section), "use_rotary_position_embeddings": False}, ()


def _refuse(problems: list[str], what: str) -> None:
    if problems:
        raise MappingError(f"{what}:\n{list_problems(problems)}", problems)
