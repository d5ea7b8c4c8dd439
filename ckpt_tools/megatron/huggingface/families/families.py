"""The families this tool knows, each a file of its own (family_files/), which is read when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from ckpt_tools.errors import CkptError, list_problems
from ckpt_tools.megatron.huggingface.config.codecs import Field
from ckpt_tools.megatron.huggingface.families.family_file import fields_of_pieces, is_whole, read_family
from ckpt_tools.megatron.huggingface.families.file_places import Problems, parse_rule_source
from ckpt_tools.megatron.huggingface.mapping.rules import Family

FOLDER = Path(__file__).parent / "family_files"
TYPES = re.compile(
    r"^(?:model_type|also_types): *(.*?) *(?:#.*)?$", re.M
)  # a line, so that nothing has to be parsed


class Families(Mapping[str, Family]):
    """The known families by name, a user's `own` in front of them; a file is parsed when its family is asked for."""

    def __init__(self, own: Family | None = None) -> None:
        self.own = own

    def __getitem__(self, name: str) -> Family:
        if self.own is not None and name == self.own.name:
            return self.own
        if name not in family_names():
            raise KeyError(name)
        return _family(name)

    def __iter__(self) -> Iterator[str]:
        own = () if self.own is None else (self.own.name,)
        return iter((*own, *(name for name in family_names() if name not in own)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def that_may_be(self, model_type: str) -> list[str]:
        """Names of the families that a config.json of this model_type may be of: one, as a rule."""
        own = [] if self.own is None else [self.own.name]
        return own + [name for name in family_names() if name == model_type or model_type in _types()[name]]


class KnownFields:
    """Fields of the known families, those of pieces first."""

    def like(self, hf: str, setting: str) -> Field | None:
        """The first field of this name and setting."""
        return next((one for one in self._named(hf) if one.arg == setting), None)

    def names(self, setting: str) -> set[str]:
        """The fields that are this setting."""
        return {one.hf for family in FAMILIES.values() for one in family.fields if one.arg == setting}

    def _named(self, hf: str) -> Iterator[Field]:
        yield from fields_of_pieces().get(hf, ())
        for name in family_names():
            if hf in _text(name):
                yield from (one for one in FAMILIES[name].fields if one.hf == hf)


@cache
def family_names() -> tuple[str, ...]:
    """The known families."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@cache
def _text(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


@cache
def _types() -> dict[str, frozenset[str]]:
    """The model types that each file names, read as text."""
    return {
        name: frozenset(word for line in TYPES.findall(_text(name)) for word in re.findall(r"[\w.-]+", line))
        for name in family_names()
    }


@cache
def _family(name: str) -> Family:
    source = parse_rule_source(_text(name), f"{name}.yaml", ours=True)
    problems = Problems()
    family = read_family(source, None, None, problems) if is_whole(source.data) else None
    if family is None or problems or family.name != name:
        raise CkptError(
            f"{FOLDER / name}.yaml does not say the family {name}:\n{list_problems(problems)}", problems
        )
    return family


FAMILIES = Families()
