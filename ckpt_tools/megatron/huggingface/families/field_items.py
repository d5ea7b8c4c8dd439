"""The fields of a family file: which setting of `ModelArgs` a field of config.json is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from ckpt_tools.megatron.huggingface.config.config_fields import REQUIRED, Field
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs, frozen
from ckpt_tools.megatron.huggingface.families.file_places import (
    Place,
    Problems,
    first_line,
    not_one_of,
    perhaps,
    typed,
    unknown_keys,
)
from ckpt_tools.megatron.huggingface.families.forms import DEFAULTS, FORMS
from ckpt_tools.megatron.huggingface.families.pieces import parts_of, pieces

FIELD_KEYS = {"setting", "default", "default_by", "form", "wins", "also"}
SETTINGS = tuple(ModelArgs.__dataclass_fields__)
KINDS = {"form": "forms", "default_by": "defaults", "wins": "ways to win"}
WINS = ("either", "reference", "checkpoint")
TRANSLATED = {"moe_layers", "sliding_layers", "no_rope_layers", "rope_scaling", "glu_interleave", "params_dtype",
              "moe_router_pre_softmax", "moe_shared_expert_intermediate_size", "activation", "tied"}  # fmt: skip


class KnownFields(Protocol):
    """The fields of the families there are."""

    def like(self, hf: str, setting: str) -> Field | None:
        """The first field of this name and setting."""

    def names(self, setting: str) -> set[str]:
        """The fields that are this setting."""


@dataclass(frozen=True, slots=True)
class FieldWords:
    """What fields may say. Of `known` families, a field of the same name and setting takes its form over; files of
    this package say theirs.
    """

    known: KnownFields | None = None
    settings: tuple[str, ...] = SETTINGS


def read_fields(
    said: Any, base: Iterable[Field], of: str, words: FieldWords, at: Place, problems: Problems
) -> tuple[tuple[Field, ...], set[str]]:
    """`base` with what a file says of fields, and the names of those that are the file's own.

    `of` is the family whose fields `base` are.
    """
    found: dict[str, tuple[Field, ...]] = {}
    for one in base:
        found[one.hf] = (*found.get(one.hf, ()), one)
    own: set[str] = set()
    for part, place in parts_of(said, "fields", at, problems):
        if not isinstance(part, Mapping):
            problems.append(f"expected a mapping of fields, found {part!r} @ {place}")
            continue
        for hf, setting in part.items():
            if hf in own and setting is not None:
                problems.append(
                    f"{hf} is said already; `{hf}: null` before this takes that back @ {place / hf}"
                )
            elif hf not in found and setting is None:
                problems.append(f"{of} has no such field to leave out{perhaps(hf, found)} @ {place / hf}")
            else:
                found.pop(hf, None)
                own -= {hf}
            if setting is not None and (made := _fields(str(hf), setting, words, place / hf, problems)):
                found[hf] = made
                own |= {hf}
    return tuple(one for fields in found.values() for one in fields), own


def with_defaults(fields: tuple[Field, ...], said: Any, at: Place, problems: Problems) -> tuple[Field, ...]:
    """The fields with what this family's class takes without them, where pieces have another's."""
    names = {one.hf for one in fields}
    problems += [
        f"there is no field {hf!r}{perhaps(hf, names)} @ {at / hf}" for hf in said if hf not in names
    ]
    return tuple(replace(one, default=frozen(said[one.hf])) if one.hf in said else one for one in fields)


def _fields(hf: str, said: Any, words: FieldWords, at: Place, problems: Problems) -> tuple[Field, ...]:
    """One field or, from a list, one for each setting that follows from it."""
    parts = said if isinstance(said, list) else [said]
    made = [_field(hf, one, words, at if said is one else at / i, problems) for i, one in enumerate(parts)]
    return tuple(one for one in made if one)


def _field(hf: str, said: Any, words: FieldWords, at: Place, problems: Problems) -> Field | None:
    said = {"setting": said} if isinstance(said, str) else said
    if not isinstance(said, Mapping):
        problems.append(f"expected a setting, a mapping or null, found {said!r} @ {at}")
        return None
    before = len(problems)
    unknown_keys(said, FIELD_KEYS, at, problems)
    setting = typed(said, "setting", str, at, problems)
    if setting not in words.settings:
        problems.append(f"unknown setting {setting!r}{perhaps(setting, words.settings)} @ {at}")
    form = _one_of(said, "form", {name: one.says for name, one in FORMS.items()}, at, problems)
    default_by = _one_of(
        said, "default_by", {name: first_line(one) for name, one in DEFAULTS.items()}, at, problems
    )
    wins = _one_of(said, "wins", WINS, at, problems)
    if "default" in said and default_by:
        problems.append(f"default and default_by are two defaults @ {at}")
    if len(problems) > before:
        return None
    known = None if form or at.source is pieces() else words.known
    like = None if known is None else known.like(hf, setting)
    if known is not None and like is None and setting in TRANSLATED:
        others = ", ".join(sorted(known.names(setting)))
        problems.append(f"{setting} has a form of its own in config.json (`form`); known are {others} @ {at}")
        return None
    made = like or Field(hf, setting)
    if form:
        made = replace(made, write=FORMS[form].write, read=FORMS[form].read)
    also = typed(said, "also", str, at, problems, default="") or made.also
    default = DEFAULTS[default_by] if default_by else frozen(said.get("default", REQUIRED))
    return replace(made, default=default, wins=wins if wins is not None else made.wins, also=also)


@cache
def fields_of_pieces() -> dict[str, list[Field]]:
    """Every field of pieces.yaml by its name, in the order of the file."""
    found: dict[str, list[Field]] = {}
    at, problems = pieces().top / "fields", Problems()
    for parts in pieces().data["fields"].values():
        for part in parts:
            for hf, said in part.items() if isinstance(part, Mapping) else ():
                found.setdefault(hf, []).extend(_fields(hf, said, FieldWords(), at, problems))
    return found


def _one_of(said: Mapping[str, Any], key: str, known: Iterable[str], at: Place, problems: Problems) -> Any:
    """The text of `key` if it is known, None if there is none."""
    if key not in said:
        return None
    value = said[key]
    if not isinstance(value, str) or value not in known:
        problems.append(f"{not_one_of(value, KINDS[key], known)} @ {at / key}")
    return value
