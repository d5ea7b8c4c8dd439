"""What commands print: tables for people, JSON for programs.

Names, paths and values come from strangers. Every sink has one function that makes them harmless there: `escape`
for lines that a terminal or a CI log shows, `json_text` for JSON; `cli.findings` has those of Markdown, GitHub and
JUnit, `commands.picture` that of SVG and HTML.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

_CI_COMMAND = re.compile(r"##(?=\w*\[)")  # Azure's ##vso[ and ##[, TeamCity's ##teamcity[, wherever in a line
_UNLIMITED = 1 << 16  # columns, when nobody looks: keys must not be folded in a file
_NARROW = 60  # columns of a terminal in which a table that does not fit becomes a list
_is_quiet = False


def be_quiet(wanted: bool) -> None:
    """Whether this process keeps its notes to itself (`--quiet`)."""
    global _is_quiet  # noqa: PLW0603  a decision about the whole process, made once by who starts it
    _is_quiet = wanted


def is_quiet() -> bool:
    """Whether it does."""
    return _is_quiet


def print_report(data: Callable[[], Any], as_json: bool, print_text: Callable[[], None]) -> None:
    """What a command has written: as JSON if it was asked for, else for people, unless they want to be left alone."""
    if as_json:
        print(json_text(data()))
    elif not _is_quiet:
        print_text()


def console() -> Console:
    """Where tables go: stdout, without colours when NO_COLOR is set or stdout is not a terminal."""
    from rich.console import Console

    return Console(
        highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _UNLIMITED
    )


def escape(name: str) -> str:
    """`name` with everything that a terminal or the log of a CI service acts on as a backslash escape.

    Terminals: control characters, what reverses or hides text, line ends of all kinds, lone surrogates. Logs: `::` at
    the beginning of a line (GitHub), `##` before a bracket anywhere (Azure, TeamCity).
    """
    if not name.isprintable():
        name = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    if "##" in name:
        name = _CI_COMMAND.sub(r"#\\x23", name)
    return name.replace("::", "\\x3a:", 1) if name.lstrip().startswith("::") else name


def escape_lines(text: str) -> str:
    """A message of several lines, each escaped."""
    return "\n".join(map(escape, text.split("\n")))


def say(note: str) -> None:
    """A note on stderr, unless the user wants none."""
    if not _is_quiet:
        print(note, file=sys.stderr)


def say_unmatched(option: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Name on stderr every glob that matches nothing, with the names that were perhaps meant."""
    from ckpt_tools.commands.close_names import unmatched

    for pattern, close in unmatched(patterns, names).items():
        hint = f" Did you mean {', '.join(map(escape, close))}?" if close else ""
        say(f"note: {option} {escape(repr(pattern))} matches nothing.{hint}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """A table on stdout; numbers are right-aligned, text that is too long for the terminal is folded."""
    values = [list(row) for row in rows]
    cells = [[f"{v:,}" if isinstance(v, int) else escape(str(v)) for v in row] for row in values]
    numeric = [bool(values) and all(isinstance(row[i], int) for row in values) for i in range(len(columns))]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if sys.stdout.isatty():
        screen = console().width
        if screen < _NARROW and sum(widths) + 2 * len(widths) > screen:
            _print_list(columns, cells, title)
        else:
            _print_rich_table(columns, cells, numeric, title)
        return
    lines = [columns, ["\u2500" * width for width in widths], *cells]
    sys.stdout.write(f"\n{title}\n" if title else "\n")
    for line in lines:
        aligned = (t.rjust(w) if n else t.ljust(w) for t, w, n in zip(line, widths, numeric, strict=True))
        sys.stdout.write("  ".join(aligned).rstrip() + "\n")


def _print_list(columns: Sequence[str], cells: Iterable[Sequence[str]], title: str) -> None:
    """The rows of a table one below the other, a line a cell, for terminals too narrow for columns."""
    sys.stdout.write(f"\n{title}\n" if title else "\n")
    for first, *rest in cells:
        sys.stdout.write(f"{first}\n")
        named = zip(columns[1:], rest, strict=True)
        sys.stdout.writelines(f"  {f'{name}: ' if name else ''}{cell}\n" for name, cell in named if cell)


def _print_rich_table(
    columns: Sequence[str], cells: Iterable[Sequence[str]], numeric: Sequence[bool], title: str
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column, is_numeric in zip(columns, numeric, strict=True):
        table.add_column(column, justify="right" if is_numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    console().print(table)


def print_tree(title: str, leaves: Iterable[tuple[str, str]]) -> None:
    """Dotted names as a tree on stdout, each leaf followed by its description."""
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text(escape(title)))
    nodes: dict[tuple[str, ...], Tree] = {(): root}
    for name, description in leaves:
        path = tuple(escape(part) for part in name.split("."))
        for depth in range(1, len(path)):
            if path[:depth] not in nodes:
                nodes[path[:depth]] = nodes[path[: depth - 1]].add(Text(path[depth - 1]))
        nodes[path[:-1]].add(Text(f"{path[-1]}  {escape(description)}"))
    console().print(root)


def json_text(value: Any, indent: int | None = 1) -> str:
    """JSON in ASCII, in which no string starts a command in a CI log."""
    return _CI_COMMAND.sub(r"\\u0023#", json.dumps(value, indent=indent))


def write_text(file: Path, text: str, source: str) -> None:
    """Write a report to `file`, `-` for stdout; who cannot read the checkpoint `source` cannot read a new file."""
    from pathlib import Path

    from ckpt_tools.execute.access import write_report

    if str(file) == "-":
        sys.stdout.write(text)
    else:
        write_report(
            file, text.encode("utf-8", "backslashreplace"), None if "://" in source else Path(source)
        )


def json_lines(head: dict[str, Any], lists: dict[str, Iterator[Any]]) -> Iterator[str]:
    """The text of one JSON object piece by piece: `head`'s members, then lists whose items are never held at once."""
    yield json_text(head)[:-2]
    for name, items in lists.items():
        yield f",\n {json.dumps(name)}: ["
        separator = "\n  "
        for item in items:
            yield separator + json_text(item, None)
            separator = ",\n  "
        yield "\n ]"
    yield "\n}\n"
