"""How options become a command, and their values the library's options.

A command is a function that declares its arguments, and the names of its options. `with_options` makes of both the
signature that Typer reads; the function gets the values by name, as the library takes them, and `fill` puts them into
the library's options classes, whose fields have the same names. A field's default is its row's too, which a test
compares: importing the classes would make `--help` three times as slow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from ckpt_tools.cli.options.row import Row
from ckpt_tools.cli.options.table import TABLE

AnyOptions = TypeVar("AnyOptions")
Given = Mapping[str, Any]
"""Values of options by the names of their rows, as the library takes them."""


def with_options(
    function: Callable[..., None],
    names: Set[str],
    own: Mapping[str, Row] | None = None,
) -> Callable[..., None]:
    """A function that Typer makes a command of: the arguments of `function`, and the options as keywords.

    Args:
        function: takes its own parameters, and the values of the options (see `Given`) as `**given`.
        names: of the options that it has of the shared table.
        own: rows of this command alone, and those that stand for one of the table.
    """
    assert names <= TABLE.keys()
    signature = inspect.signature(function, eval_str=True)
    own = own or {}
    rows = {name: row for name, row in own.items() if name not in TABLE}
    rows |= {name: own.get(name, row) for name, row in TABLE.items() if name in {*names, *own}}
    arguments = [
        p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name not in rows
    ]
    made = [row.parameter(name) for name, row in rows.items()]

    def command(*args: Any, **given: Any) -> None:
        values = {name: row.value(given.pop(name)) for name, row in rows.items()}
        function(*args, **given, **values)

    command.__signature__ = signature.replace(parameters=[*arguments, *made])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*arguments, *made)}
    command.__doc__ = function.__doc__
    command.rows = rows  # type: ignore[attr-defined]
    return command


def read_values(context: Any) -> dict[str, Any]:
    """The values of the options of a command that was parsed and is not to be run, as it would get them."""
    rows: Mapping[str, Row] = context.command.callback.rows
    given = {name: context.params[name] for name in rows}
    paths = {name for name, row in rows.items() if row.kind is Path and given[name] is not None}
    return {
        name: row.value(Path(given[name]) if name in paths else given[name]) for name, row in rows.items()
    }


def fill(options: type[AnyOptions], given: Given, **more: Any) -> AnyOptions:
    """Options of the library from the given values of the same names, options inside them too; `more` wins."""
    values = dict(more)
    for field in fields(options):  # type: ignore[arg-type]
        inner: Any = field.default_factory
        if field.name in values:
            continue
        if field.name in given:
            values[field.name] = given[field.name]
        elif is_dataclass(inner):
            values[field.name] = fill(cast(Any, inner), given)
    return options(**values)
