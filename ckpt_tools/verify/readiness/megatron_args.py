"""Megatron-LM's command line, read as its own parser reads it: the flags and defaults of each version.

`megatron_flags.json` is what those parsers said when they were asked (tests/verify/megatron_flags.py).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any, Literal, NamedTuple, NoReturn

_NOT_IN_PATTERN = re.compile(r"[^,\d\[\]()+*]")  # arguments.py _eval_pattern: not even a space
_LONGEST_PATTERN = 100_000  # layers

MAX_WORDS = 2_000  # of a command line: four times the longest recipe of today


class Flag(NamedTuple):
    """One setting as a version's parser takes it; `kind` is store, true, false or bool (`--x` and `--no-x`)."""

    options: tuple[str, ...]
    name: str
    kind: Literal["store", "true", "false", "bool"]
    type: str
    nargs: str | int | None
    default: Any
    choices: tuple[Any, ...] | None


class Parsed(NamedTuple):
    """What a parser took from a command line, and what it refuses about it."""

    given: dict[str, Any]
    unknown: tuple[str, ...]  # words that no flag of this version takes
    refused: str | None


@cache
def flags_of(version: str) -> tuple[Flag, ...]:
    """Every flag of a version, in the order of their spelling."""
    table = _table()
    number = table["versions"].index(version)
    return tuple(
        Flag(tuple(options), name, kind, type_, nargs, default, None if choices is None else tuple(choices))
        for versions, options, name, kind, type_, nargs, default, choices in table["flags"]
        if number in versions
    )


def versions_with(option: str) -> tuple[str, ...]:
    """The versions whose parser knows a flag."""
    return tuple(version for version in _table()["versions"] if is_flag(option, version))


def is_flag(option: str, version: str) -> bool:
    """Whether a version's parser knows a flag."""
    return option in _options(version)


@cache
def _options(version: str) -> frozenset[str]:
    return frozenset(option for flag in flags_of(version) for option in flag.options)


@cache
def defaults_of(version: str) -> dict[str, Any]:
    """What every setting is when nothing is given."""
    return {flag.name: flag.default for flag in reversed(flags_of(version))}


def parse_flags(words: Sequence[str], version: str) -> Parsed:
    """The settings that a command line gives, by Megatron's names; abbreviations are unknown, as there."""
    if len(words) > MAX_WORDS:  # argparse looks at all flags again for every word
        return Parsed({}, (), f"{len(words):,} words; at most {MAX_WORDS:,} are looked at")
    try:
        given, unknown = _parser(version).parse_known_args(list(words))
    except _RefusedError as error:
        return Parsed({}, (), str(error))
    return Parsed(vars(given), tuple(unknown), None)


def flag_words(name: str, value: Any, version: str, always: bool = False) -> list[str] | None:
    """The words that set `name` to `value`, None when no flag of the version can; none for the default, unless
    `always`."""
    flags = [flag for flag in flags_of(version) if flag.name == name]
    if flags and value == defaults_of(version)[name] and not always:
        return []
    return next((words for flag in flags if (words := _words(flag, value)) is not None), None)


def _words(flag: Flag, value: Any) -> list[str] | None:
    if flag.kind == "store":
        items = list(value) if flag.nargs is not None and isinstance(value, list | tuple) else [value]
        known = flag.choices is None or all(item in flag.choices for item in items)
        if not items or not known or any(item is None or isinstance(item, bool) for item in items):
            return None
        return [flag.options[0], *(_runs(item) if flag.type == "pattern" else str(item) for item in items)]
    if not isinstance(value, bool):
        return None
    if flag.kind == "bool":
        return [next(o for o in flag.options if o.startswith("--no-") != value)]
    return [flag.options[0]] if value == (flag.kind == "true") else None


def _runs(value: Any) -> str:
    """A pattern as short as it can be said: `[0]*3+[1]*58`."""
    if not isinstance(value, list):
        return str(value)
    return "+".join(f"[{item}]*{len(list(group))}" for item, group in groupby(value))


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        (files("ckpt_tools.verify.readiness") / "megatron_flags.json").read_bytes()
    )
    return table


class _RefusedError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _RefusedError(message)


@cache
def _parser(version: str) -> _Parser:
    parser = _Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    for flag in flags_of(version):
        if flag.kind == "store":
            parser.add_argument(
                *flag.options, dest=flag.name, nargs=flag.nargs, choices=flag.choices, type=_TYPES[flag.type]
            )
            continue
        for options, value in _switches(flag):
            parser.add_argument(*options, dest=flag.name, action="store_const", const=value)
    return parser


def _switches(flag: Flag) -> list[tuple[list[str], bool]]:
    if flag.kind != "bool":
        return [(list(flag.options), flag.kind == "true")]
    off = [option for option in flag.options if option.startswith("--no-")]
    return [([option for option in flag.options if option not in off], True), (off, False)]


def pattern(text: str) -> int | list[int]:
    """A frequency: a number, or a list that is built from lists with + and * as Python would."""
    if "[" not in text:
        return int(text)
    if _NOT_IN_PATTERN.search(text):
        raise ValueError("only digits, commas, brackets, + and * make a pattern")
    try:
        built = _built(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a list of numbers ({error})") from None
    if not isinstance(built, list):
        raise ValueError("not a list of numbers")
    return built


def _built(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [item for item in map(_built, node.elts) if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _built(node.left), _built(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            items, times = (left, right) if isinstance(left, list) else (right, left)
            if isinstance(items, list) and isinstance(times, int) and len(items) * times <= _LONGEST_PATTERN:
                return items * times
    raise ValueError("not a list of numbers built with + and *")


def _tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip("()").split(","))


_TYPES: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,  # argparse's own trap: every word but the empty one is true
    "tuple": _tuple,
    "pattern": pattern,
}
