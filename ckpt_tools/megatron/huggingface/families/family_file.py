"""A family of a file: what is said in it, with that of the family it is like, and whether it all goes together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

from ckpt_tools.megatron.huggingface.config.codecs import DEFAULTS, FORMS, REQUIRED, Field, plain_read
from ckpt_tools.megatron.huggingface.config.ledger import arguments
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs, frozen
from ckpt_tools.megatron.huggingface.families.file_places import (
    Place,
    first_line,
    not_one_of,
    perhaps,
    texts,
    twice,
    typed,
    unknown_keys,
    written_numbers,
)
from ckpt_tools.megatron.huggingface.families.rule_items import (
    LAYER,
    Names,
    Words,
    core_in_mtp,
    has_mtp,
    in_mtp,
    parts_of,
    pieces,
    read_rules,
)
from ckpt_tools.megatron.huggingface.mapping.checks import EMBEDDING, HEAD
from ckpt_tools.megatron.huggingface.mapping.rules import (
    CONDITIONS,
    DIMENSIONS,
    Condition,
    Family,
    OneOf,
    Rule,
    allows,
)

FIELD_KEYS = {"setting", "default", "default_by", "form", "wins", "also"}
KINDS = {"form": "forms", "default_by": "defaults", "wins": "ways to win"}
WINS = ("either", "reference", "checkpoint")
# The fields of the known families, of one name or all: a user's field of the same name and setting gets their
# form. Files of this package say theirs (None).
KnownFields: TypeAlias = Callable[[str | None], Iterable[Field]]
TRANSLATED = {"moe_layers", "sliding_layers", "no_rope_layers", "rope_scaling", "glu_interleave", "params_dtype",
              "moe_router_pre_softmax", "moe_shared_expert_intermediate_size", "activation", "tied"}  # fmt: skip


def read_fields(
    said: Any,
    base: Iterable[Field],
    of: str,
    known: KnownFields | None,
    settings: tuple[str, ...],
    at: Place,
) -> tuple[tuple[Field, ...], set[str]]:
    """`base` with what a file says of fields, and the names of those that are the file's own.

    `base` are the fields of the family `of`.
    """
    found: dict[str, tuple[Field, ...]] = {}
    for one in base:
        found[one.hf] = (*found.get(one.hf, ()), one)
    own: set[str] = set()
    for part, place in parts_of(said, "fields", at):
        for hf, setting in part.items():
            if hf in own and setting is not None:
                (place / hf).fault(f"{hf} is said already; `{hf}: null` before this takes that back")
            elif hf not in found and setting is None:
                (place / hf).fault(f"{of} has no such field to leave out{perhaps(hf, found)}")
            else:
                found.pop(hf, None)
                own -= {hf}
            if setting is not None and (made := _fields_of(str(hf), setting, known, settings, place / hf)):
                found[hf] = made
                own |= {hf}
    return tuple(one for fields in found.values() for one in fields), own


def _fields_of(
    hf: str, said: Any, known: KnownFields | None, settings: tuple[str, ...], at: Place
) -> tuple[Field, ...]:
    """One field or, from a list, one for each setting that follows from it."""
    parts = said if isinstance(said, list) else [said]
    places = [at if said is one else at / i for i, one in enumerate(parts)]
    made = [_field(hf, one, known, settings, place) for one, place in zip(parts, places, strict=True)]
    return tuple(one for one in made if one)


def _field(
    hf: str, said: Any, known: KnownFields | None, settings: tuple[str, ...], at: Place
) -> Field | None:
    said = {"setting": said} if isinstance(said, str) else said
    if not isinstance(said, Mapping):
        at.fault(f"expected a setting, a mapping or null, found {said!r}")
        return None
    before = len(at.problems)
    unknown_keys(said, FIELD_KEYS, at)
    setting = typed(said, "setting", str, at)
    if setting not in settings:
        at.fault(f"unknown setting {setting!r}{perhaps(setting, settings)}")
    form = _one_of(said, "form", {name: one.says for name, one in FORMS.items()}, at)
    default_by = _one_of(said, "default_by", {name: first_line(one) for name, one in DEFAULTS.items()}, at)
    wins = _one_of(said, "wins", WINS, at)
    if "default" in said and default_by:
        at.fault("default and default_by are two defaults")
    if len(at.problems) > before:
        return None
    known = None if form or at.source is pieces() else known
    like = None if known is None else next((one for one in known(hf) if one.arg == setting), None)
    if known is not None and like is None and setting in TRANSLATED:
        others = ", ".join(sorted({one.hf for one in known(None) if one.arg == setting}))
        at.fault(f"{setting} has another form in config.json (`form`); known are {others}")
        return None
    made = like or Field(hf, setting)
    if form:
        made = replace(made, write=FORMS[form].write, read=FORMS[form].read)
    also = typed(said, "also", str, at, default="") or made.also
    default = DEFAULTS[default_by] if default_by else frozen(said.get("default", REQUIRED))
    return replace(made, default=default, wins=wins if wins is not None else made.wins, also=also)


@cache
def fields_of_pieces() -> dict[str, list[Field]]:
    """Every field of pieces.yaml by its name, in the order of the file."""
    found: dict[str, list[Field]] = {}
    at = pieces().top / "fields"
    for parts in pieces().data["fields"].values():
        for part in parts if isinstance(parts, list) else [parts]:
            for hf, said in part.items() if isinstance(part, Mapping) else ():
                found.setdefault(hf, []).extend(_fields_of(hf, said, None, tuple(SETTINGS), at))
    return found


def _one_of(said: Mapping[str, Any], key: str, known: Iterable[str], at: Place) -> Any:
    if key not in said:
        return None
    value = said[key]
    if not isinstance(value, str) or value not in known:
        (at / key).fault(f"{not_one_of(value, KINDS[key], known)}")
    return value


FAMILY_KEYS = {"family", "architecture", "model_type", "also_types", "like", "names", "fields", "defaults", "fixed",
               "needs", "rules", "without", "mtp", "settings", "dimensions", "conditions", "ignored", "copies",
               "unset", "plus_one", "window_turn", "published", "written"}  # fmt: skip
SETTINGS = ModelArgs.__dataclass_fields__
DENSE_MTP = "dense"
NEEDED = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "max_position_embeddings")


def is_whole(data: Any) -> bool:
    """Whether a file says all of its family, and takes nothing over: its fields are a list then."""
    return isinstance(data, Mapping) and "like" not in data and isinstance(data.get("fields"), list)


def read_family(top: Place, base: Family | None, known: KnownFields | None) -> Family | None:
    """The family that the file at `top` describes; if it describes none: None, or entries in `top.problems`.

    `base` is the family that it is like. `known` are the fields of all families, where the file is a user's.
    """
    data = top.source.data
    top.problems += twice(top.source)
    if not isinstance(data, Mapping):
        top.fault("expected a mapping")
        return None
    unknown_keys(data, FAMILY_KEYS, top)
    for part in ("fields", "defaults", "fixed", "needs"):
        top.problems += written_numbers(data.get(part), top / part)
    name = typed(data, "family", str, top)
    old = base or Family("", "", (), ())
    places: dict[tuple[str, str], Place] = {}
    fixed, needs = (_demands(data, kind, top, places) for kind in ("fixed", "needs"))
    settings = (*old.settings, *_settings(data, needs, top / "settings"))
    fields, own = _fields(data, old, needs, known, (*SETTINGS, *settings), top)
    names = _names(data, top / "names")
    sizes = _dimensions(data, settings, top)
    said = typed(data, "conditions", dict, top, default={})
    conditions = {
        name: condition
        for name, value in said.items()
        if (condition := _condition(name, value, settings, top / "conditions" / name))
    }
    words = Words(names, (*DIMENSIONS, *old.dimensions, *sizes), (*CONDITIONS, *old.conditions, *conditions))
    ignored = texts(data.get("ignored", []), top / "ignored")
    for i, pattern in enumerate(ignored):
        try:
            re.compile(pattern)
        except re.error:
            (top / "ignored" / i).fault("not a regular expression")
    carried = {name for one in fields if one not in old.fields for name in (one.hf, one.arg)}
    family = replace(
        old,
        name=name,
        like=old.name,
        architecture=typed(data, "architecture", str, top, default=old.architecture or None),
        model_type=typed(data, "model_type", str, top, default=name if base else ""),
        also_types=texts(data.get("also_types", list(old.also_types)), top / "also_types"),
        rules=_rules(data, old, needs, words, top),
        fields=fields,
        fixed={name: value for name, value in old.fixed.items() if name not in carried} | fixed,
        needs={name: value for name, value in old.needs.items() if name not in carried} | needs,
        published=typed(data, "published", str, top, default=old.published),
        plus_one=typed(data, "plus_one", bool, top, default=old.plus_one),
        copies=(*old.copies, *_copies(data, names, top / "copies")),
        ignored=(*old.ignored, *ignored),
        window_turn=typed(data, "window_turn", int, top, default=old.window_turn),
        unset=(*old.unset, *texts(data.get("unset", []), top / "unset")),
        written=typed(data, "written", dict, top, default=dict(old.written)),
        settings=settings,
        dimensions={**old.dimensions, **sizes},
        conditions={**old.conditions, **conditions},
    )
    top.problems += _contradictions(family, own, top, places)
    top.problems += [
        f"no text has <{one}> @ {top / 'names' / one}" for one in _own_names(data) if one not in names.used
    ]
    return family


def _contradictions(
    family: Family, own: set[str], top: Place, places: Mapping[tuple[str, str], Place]
) -> list[str]:
    """What the file says of its fields against what it demands, and what no family can do without."""
    found = [
        f"{name} is a field of this file, and has one value (`fixed`): keep one of both @ {at}"
        for (kind, name), at in places.items()
        if kind == "fixed" and name in own
    ]
    for one in family.fields:
        plain = one.read is plain_read and one.default is not REQUIRED and not callable(one.default)
        at = places.get(("needs", one.arg))
        if one.hf in own and at and plain and not allows(family.needs[one.arg], one.default):
            found.append(
                f"without {one.hf} in config.json it is {one.default!r}, and needs demands "
                f"{family.needs[one.arg]!r} @ {at}"
            )
    args = {one.arg for one in family.fields}
    found += [f"no field is {one} @ {top / 'fields'}" for one in NEEDED if one not in args]
    if not args & {"ffn_hidden_size", "moe_ffn_hidden_size", "hybrid_pattern"}:
        found.append(f"no field is ffn_hidden_size or moe_ffn_hidden_size @ {top / 'fields'}")
    if not any(rule.core == EMBEDDING for rule in family.rules):
        found.append(f"no rule is that of {EMBEDDING} @ {top / 'rules'}")
    return found


def _demands(
    data: Mapping[str, Any], kind: str, top: Place, places: dict[tuple[str, str], Place]
) -> dict[str, Any]:
    """Values by name, with their places; of two pieces that demand one thing, both the same."""
    found: dict[str, Any] = {}
    for part, place in parts_of(data.get(kind, {}), kind, top / kind):
        for name, value in part.items():
            at = places[kind, name] = place / name
            wanted = _wanted(value, kind, name, at)
            if kind == "needs" and name not in SETTINGS and name not in arguments().changes:
                at.fault(f"unknown setting{perhaps(name, (*SETTINGS, *arguments().changes))}")
            if name in found and found[name] != wanted:
                at.fault(f"{name} is {found[name]!r} already")
            found[name] = wanted
    return found


def _wanted(value: Any, kind: str, name: object, at: Place) -> Any:
    if isinstance(value, Mapping) and value.keys() == {"one_of"}:
        values = value["one_of"]
        if not isinstance(values, list) or len(values) < 2:
            at.fault("one_of is a list of several values")
            return None
        return frozen(values) if kind == "fixed" else OneOf(frozen(values))
    return frozen(value) if kind == "needs" and name in SETTINGS else value


def _names(data: Mapping[str, Any], at: Place) -> Names:
    said = _own_names(data)
    wrong = [name for name, text in said.items() if not isinstance(name, str) or not isinstance(text, str)]
    for name in wrong:
        (at / name).fault("expected a text")
    if not isinstance(data.get("names", {}), dict):
        at.fault("expected a mapping of names")
    return Names({name: text for name, text in said.items() if name not in wrong})


def _own_names(data: Mapping[str, Any]) -> dict[str, str]:
    said = data.get("names", {})
    return said if isinstance(said, dict) else {}


def _settings(data: Mapping[str, Any], needs: Mapping[str, Any], at: Place) -> tuple[str, ...]:
    """Megatron's arguments that this family carries, and that `ModelArgs` has no field for."""
    found = texts(data.get("settings", []), at)
    for i, name in enumerate(found):
        if name in SETTINGS or name in arguments().carried:
            (at / i).fault(f"{name} is carried for every family")
        if name in needs:
            (at / i).fault(f"{name} has one value (`needs`) and is not carried: one of both")
    return found


def _dimensions(data: Mapping[str, Any], own: tuple[str, ...], top: Place) -> dict[str, str]:
    found, at = {}, top / "dimensions"
    for name, setting in typed(data, "dimensions", dict, top, default={}).items():
        size = isinstance(setting, str) and (
            setting in own or (setting in SETTINGS and "int" in str(SETTINGS[setting].type).split(" | "))
        )
        if name in DIMENSIONS:
            (at / name).fault(f"{name} is a dimension already")
        elif not size:
            (at / name).fault(f"{setting!r} is not a setting that is a size{perhaps(setting, own)}")
        else:
            found[name] = setting
    return found


def _condition(name: str, value: Any, own: tuple[str, ...], at: Place) -> Condition | None:
    """What a setting is, of the layer where it has a value for each."""
    said = {"setting": value} if isinstance(value, str) else value
    if not isinstance(said, Mapping):
        at.fault(f"expected a setting or a mapping, found {value!r}")
        return None
    unknown_keys(said, {"setting", "is", "is_not"}, at)
    setting = typed(said, "setting", str, at)
    kind = "" if setting in own else str(SETTINGS[setting].type) if setting in SETTINGS else None
    if name in CONDITIONS:
        at.fault(f"{name} is a condition already")
    elif kind is None or any(one in kind for one in ("RopeScaling", "GluInterleave", "Mapping")):
        near = perhaps(setting, (*SETTINGS, *own))
        (at / "setting" if "setting" in said else at).fault(f"unknown setting {setting!r}{near}")
    elif "is" in said and "is_not" in said:
        at.fault("is and is_not are two conditions")
    else:
        wanted = said.get("is", said.get("is_not", []))
        return Condition(
            setting, tuple(wanted) if isinstance(wanted, list) else (wanted,), "is_not" not in said
        )
    return None


def _copies(data: Mapping[str, Any], names: Names, at: Place) -> tuple[tuple[str, str], ...]:
    found = []
    for part, place in parts_of(data.get("copies", []), "copies", at):
        unknown_keys(part, {"core", "hf"}, place)
        core, hf = (names.fill(typed(part, key, str, place), place / key) for key in ("core", "hf"))
        if core not in (EMBEDDING, HEAD):
            (place / "core").fault(f"{core!r} is not {EMBEDDING} or {HEAD}")
        if "{n}" not in hf:
            (place / "hf").fault(f"{hf!r} is to have {{n}}: the copies are those in prediction modules")
        found.append((core, hf))
    return tuple(found)


def _fields(
    data: Mapping[str, Any], old: Family, needs: Mapping[str, Any], known: KnownFields | None,
    settings: tuple[str, ...], top: Place
) -> tuple[tuple[Field, ...], set[str]]:  # fmt: skip
    kept = old.fields
    if _drops_latent_attention(old, needs):
        latent = {one.arg for one in _piece_of_fields("mla")}
        kept = (*(one for one in kept if one.arg not in latent), *_piece_of_fields("head_dim"))
    said = data.get("fields", {})
    fields, own = read_fields(said, kept, old.name or "this family", known, settings, top / "fields")
    defaults = typed(data, "defaults", dict, top, default={})
    names = {one.hf for one in fields}
    top.problems += [
        f"there is no field {hf!r}{perhaps(hf, names)} @ {top / 'defaults' / hf}"
        for hf in defaults
        if hf not in names
    ]
    # what this family's class takes without them, where pieces have another's
    fields = tuple(replace(f, default=frozen(defaults[f.hf])) if f.hf in defaults else f for f in fields)
    return fields, own


def _rules(
    data: Mapping[str, Any],
    old: Family,
    needs: Mapping[str, Any],
    words: Words,
    top: Place,
) -> tuple[Rule, ...]:
    """The rules of `old` with the file's own, which replace those of the same parameter."""
    without = texts(data.get("without", []), top / "without")
    taken = old.rules
    if _drops_latent_attention(old, needs):  # common attention in its place, in prediction modules too
        latent, plain = _piece_of_rules("mla"), _piece_of_rules("self_attention", "qk_norm")
        if has_mtp(old.rules):
            latent, plain = ([*part, *map(in_mtp, part)] for part in (latent, plain))
        taken = (*(rule for rule in old.rules if rule not in latent), *plain)
    cores = {rule.core for rule in old.rules}
    top.problems += [
        f"no rule for {core!r} to leave out{perhaps(core, cores)} @ {top / 'without' / i}"
        for i, core in enumerate(without)
        if core not in cores
    ]
    own = read_rules(data.get("rules", []), words, top / "rules")
    if has_mtp(old.rules):
        own += _inside_mtp(own, own)
    replaced = {rule.core for rule in own} | {name for core in without for name in (core, core_in_mtp(core))}
    rules = [*{(rule.core, rule.when): rule for rule in taken if rule.core not in replaced}.values(), *own]
    dense = data.get("mtp") == DENSE_MTP
    if dense or typed(data, "mtp", bool, top, default=False):
        layers = (words.names.fill(text, top / "mtp") for text in ("<layer>", "<mtp_layer>"))
        inside = rules
        if dense:  # whatever the layer before it is
            no_experts = (rule for rule in rules if "moe" not in rule.when)
            inside = [replace(r, when=tuple(word for word in r.when if word != "dense")) for r in no_experts]
        rules += _inside_mtp(inside, rules, *layers)
    return tuple(rules)


def _inside_mtp(layers: list[Rule], there: list[Rule], *names: str) -> list[Rule]:
    """The rules of decoder layers for the layer inside a prediction module, which has no rule yet."""
    cores = {rule.core for rule in there}
    made = [in_mtp(rule, *names) for rule in layers if rule.core.startswith(LAYER)]
    return [rule for rule in made if rule.core not in cores]


def _drops_latent_attention(old: Family, needs: Mapping[str, Any]) -> bool:
    return bool(old.needs.get("multi_latent_attention")) and needs.get("multi_latent_attention") is False


def _piece_of_rules(*names: str) -> list[Rule]:
    words = Words(Names({}), DIMENSIONS, tuple(CONDITIONS))
    return read_rules(list(names), words, pieces().top / "rules")


def _piece_of_fields(name: str) -> tuple[Field, ...]:
    return read_fields([name], (), "", None, tuple(SETTINGS), pieces().top / "fields")[0]
