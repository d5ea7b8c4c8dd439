"""What a YAML file of rules says, each value with the place and the line that an error about it names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ckpt_tools.formats.untrusted_documents import parse_marked_yaml

if TYPE_CHECKING:
    import yaml

Problems: TypeAlias = list[str]
_NUMBER = re.compile(r"(?P<digits>[-+]?\d+(\.\d*)?)[eE](?P<sign>[-+]?)(?P<power>\d+)")


@dataclass(frozen=True, slots=True)
class RuleSource:
    """A parsed file; `name` is said in errors where it is not the file that they are about."""

    data: Any
    node: yaml.Node | None = field(compare=False, repr=False)
    name: str = ""

    @property
    def top(self) -> Place:
        return Place(self)


@dataclass(frozen=True, slots=True)
class Place:
    """A value's place in its file: `$.rules[3].layout (line 12)`."""

    source: RuleSource
    path: tuple[object, ...] = ()

    def __truediv__(self, key: object) -> Place:
        return Place(self.source, (*self.path, key))

    def __str__(self) -> str:
        text = "$" + "".join(f"[{key}]" if type(key) is int else f".{key}" for key in self.path)
        node = self.source.node
        line = f" (line {_line(node, self.path)})" if node is not None else ""
        return f"{self.source.name} {text}{line}".lstrip()


def parse_rule_source(data: bytes | str, name: str = "", *, ours: bool = False) -> RuleSource:
    return RuleSource(*parse_marked_yaml(data, ours=ours), name)


def twice(source: RuleSource) -> Iterator[str]:
    """Keys that stand twice in one mapping, of which YAML takes the last without a word."""
    waiting = [] if source.node is None else [source.node]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))
        keys = [
            one[0].value for one in node.value if isinstance(one, tuple) and isinstance(one[0].value, str)
        ]
        for number, one in enumerate(node.value):
            pair = isinstance(one, tuple)
            if (
                pair
                and isinstance(one[0].value, str)
                and one[0].value in keys[:number]
                and one[0].value != "<<"
            ):
                yield f"{one[0].value!r} stands twice in one mapping (line {one[0].start_mark.line + 1})"
            waiting += [one[1]] if pair else [one]


def _line(node: yaml.Node, path: tuple[object, ...]) -> int:
    """The line of the value at `path`, or of the last part of the path that is there."""
    line = int(node.start_mark.line)
    for key in path:
        parts = node.value if isinstance(node.value, list) else []
        if type(key) is int and all(not isinstance(one, tuple) for one in parts) and key < len(parts):
            found = (parts[key], parts[key])
        else:
            named = [one for one in parts if isinstance(one, tuple) and _same(one[0].value, key)]
            if not named:
                break
            found = named[-1]
        line, node = int(found[0].start_mark.line), found[1]
    return line + 1


def _same(written: object, key: object) -> bool:
    return isinstance(written, str) and written.lower() == str(key).lower()


def typed(
    data: Mapping[str, Any], key: str, kind: type, at: Place, problems: Problems, *, default: Any = None
) -> Any:
    """The value of `key`; without `default` (None) it must be there."""
    value = data.get(key, default)
    if not isinstance(value, kind):
        found = "missing" if value is None else f"expected {kind.__name__}, found {value!r}"
        problems.append(f"{found} @ {at / key}")
        return kind()
    return value


def texts(value: Any, at: Place, problems: Problems) -> tuple[str, ...]:
    """A list of texts, or one text for a list of one."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        problems.append(f"expected a text or a list of texts, found {value!r} @ {at}")
        return ()
    return tuple(values)


def written_numbers(value: Any, at: Place) -> Iterator[str]:
    """Texts that were meant as numbers: YAML takes 1.0e6 for a text, and 1.0e+6 for a number."""
    parts = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, part in parts:
        yield from written_numbers(part, at / key)
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if found:
        number = f"{found['digits']}{'' if '.' in value else '.0'}e{found['sign'] or '+'}{found['power']}"
        yield f"{value!r} is a text to YAML; write {number} @ {at}"


def unknown_keys(data: Mapping[str, Any], known: set[str], at: Place, problems: Problems) -> None:
    problems += [f"unknown key{perhaps(key, known)} @ {at / key}" for key in data if key not in known]


def perhaps(value: object, known: Iterable[str], most: int = 3) -> str:
    """What was perhaps meant by a word that is not one of `known`, with what each says where that is told, or ""."""
    said = known if isinstance(known, Mapping) else {}
    close = difflib.get_close_matches(str(value), list(known), n=most)
    near = [f"{one} ({said[one]})" if isinstance(said.get(one), str) else one for one in close]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def not_one_of(value: object, kind: str, known: Iterable[str]) -> str:
    """That a word is not one of `known`: with those near it, or all of them where none is."""
    return f"{value!r} is not one of the {kind}{perhaps(value, known) or '; known are ' + ', '.join(known)}"


def first_line(made: object) -> str:
    """What a function does, in the words of its docstring's first line."""
    text = (made.__doc__ or "").partition("\n")[0].removesuffix(".")
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]
