"""An option is a row: its spelling, help, choices, limits, default, and what the library gets of what is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer


class Row(NamedTuple):
    """Plain data; what Typer reads is made of it when a command is built, because most commands have few options."""

    kind: Any  # a type, or a `Literal`, which is a choice of its words
    spelled: tuple[str, ...]
    default: Any
    read: Callable[[Any], Any] | None
    how: Mapping[str, Any]

    def parameter(self, name: str) -> inspect.Parameter:
        """The option as a parameter of a function that Typer makes a command of."""
        kind, default = self.kind, self.default
        (inner,) = get_args(kind) if get_origin(kind) is list else (kind,)
        if get_origin(inner) is Literal:
            # Typer knows `Literal` since 0.19 only, enumerations always.
            words: Any = _enumeration(get_args(inner))
            kind = words if inner is kind else list[words]
            default = None if default is None else words(default)
        spelled: Any = Annotated[
            kind | None if default is None else kind, typer.Option(*self.spelled, **self.how)
        ]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=spelled)

    def value(self, given: Any) -> Any:
        """What the library gets."""
        plain = [_plain(one) for one in given] if isinstance(given, list) else _plain(given)
        return plain if self.read is None else self.read(plain)


def _plain(given: Any) -> Any:
    return given.value if isinstance(given, Enum) else given


def _enumeration(words: tuple[str, ...]) -> Any:
    return Enum("Choice", {word: word for word in words}, type=str)


def option(
    kind: Any,
    *spelled: str,
    default: Any = None,
    read: Callable[[Any], Any] | None = None,
    panel: str | None = None,
    **how: Any,
) -> Row:
    """An option of type `kind`; without a default it is None when it is not given.

    Args:
        spelled: as Typer takes them: "--threads", "--swiglu/--no-swiglu".
        read: makes the library's value of what was given.
        panel: the section of help.
        how: `help`, and whatever else `typer.Option` takes.
    """
    return Row(kind, spelled, default, read, {"rich_help_panel": panel, **how})


def flag(*spelled: str, **how: Any) -> Row:
    """An option that is either there or not."""
    return option(bool, *spelled, default=False, **how)
