"""What commands print: tables for people, JSON for programs.

Names, paths and values come from strangers. Every sink has one function that makes them harmless there: `escape`
for lines that a terminal or a CI log shows, `json_text` for JSON; `cli.findings` has those of Markdown, GitHub and
JUnit, `commands.picture` that of SVG and HTML.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TextIO

from ckpt_tools.cli.render import fold

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

_CI_COMMAND = re.compile(r"##(?=\w*\[)")  # Azure's ##vso[ and ##[, TeamCity's ##teamcity[, wherever in a line
_UNLIMITED = 1 << 16  # columns, when nobody looks: keys must not be folded in a file
_GAP = "  "  # between the columns of a table
_is_quiet = False


def be_quiet(wanted: bool) -> None:
    """Whether this process says nothing but errors, and gives what is for programs (`--quiet`)."""
    global _is_quiet  # noqa: PLW0603  a decision about the whole process, made once by who starts it
    _is_quiet = wanted


def is_quiet() -> bool:
    """Whether it does."""
    return _is_quiet


def print_report(data: Callable[[], Any], as_json: bool, print_text: Callable[[], None]) -> None:
    """What a command has found or written: as JSON if it was asked for, else for people."""
    if as_json:
        print(json_text(data()))
    else:
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


def tell(text: str = "", stream: TextIO | None = None) -> None:
    """Print text that is harmless already on stdout, or `stream`, for people who want to be told."""
    if not _is_quiet:
        _write(text, stream or sys.stdout)


def _write(text: str, stream: TextIO) -> None:
    """Print text; a terminal gets it folded between words."""
    width = fold.columns_of(stream)
    lines = text.split("\n")
    if width is not None:
        lines = [part for line in lines for part in fold.fold_line(line, width)]
    print("\n".join(lines), file=stream, flush=True)


def tell_first(lines: Sequence[str], most: int, indent: str = "", what: str = "more") -> None:
    """Print the first `most` of some lines, and how many there are beyond."""
    for line in lines[:most]:
        tell(indent + escape(line))
    if len(lines) > most:
        tell(f"{indent}... and {len(lines) - most:,} {what} (--json lists all)")


def tell_whole(text: str) -> None:
    """Print lines of numbers on stdout, which are not folded."""
    if not _is_quiet:
        print(text)


def tell_command(text: str) -> None:
    """Print shell lines; a terminal gets them folded so that they are still those when they are copied."""
    if _is_quiet:
        return
    width = fold.columns_of(sys.stdout)
    for line in text.split("\n"):
        print("\n".join([line] if width is None else fold.fold_command(line, width)))


def complain(error: str) -> None:
    """An error, of one or several lines, on stderr."""
    _write(escape_lines(error), sys.stderr)


def say(note: str) -> None:
    """A note on stderr."""
    tell(note, sys.stderr)


def say_unmatched(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Name on stderr every glob of `--keys` that matches nothing, with the names that were perhaps meant."""
    from ckpt_tools.close_names import unmatched

    for pattern, close in unmatched(patterns, names).items():
        hint = f" Did you mean {', '.join(map(escape, close))}?" if close else ""
        say(f"note: --keys {escape(repr(pattern))} matches nothing.{hint}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """A table on stdout; numbers are right-aligned, text that is too long for the terminal is folded."""
    if _is_quiet:
        return
    values = [list(row) for row in rows]
    cells = [[f"{v:,}" if isinstance(v, int) else escape(str(v)) for v in row] for row in values]
    numeric = [bool(values) and all(isinstance(row[i], int) for row in values) for i in range(len(columns))]
    tell(f"\n{title}" if title else "")
    screen = fold.columns_of(sys.stdout)
    if screen is None or not cells:
        _print_columns(columns, cells, [max(map(len, c)) for c in zip(columns, *cells, strict=True)], numeric)
    elif widths := _fitting(columns, cells, screen):
        _print_columns(columns, cells, widths, numeric)
    elif all(columns[1:]) and (widths := _fitting(*(flipped := _flipped(columns, cells)), screen)):
        _print_columns(*flipped, widths, [False, *(True for _ in cells)])
    else:
        _print_list(columns, cells, screen)


def _fitting(columns: Sequence[str], cells: Sequence[Sequence[str]], screen: int) -> list[int] | None:
    return fold.column_widths(columns, cells, screen - len(_GAP) * (len(columns) - 1))


def _flipped(
    columns: Sequence[str], cells: Sequence[Sequence[str]]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Rows as columns."""
    first, *rest = zip(columns, *cells, strict=True)
    return first, rest


def _print_columns(
    columns: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int], numeric: Sequence[bool]
) -> None:
    is_bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for index, row in enumerate([columns, ["\u2500" * width for width in widths], *cells]):
        for line in _aligned(row, widths, numeric):
            print(f"\x1b[1m{line}\x1b[0m" if is_bold and not index else line)


def _aligned(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> Iterator[str]:
    """A row of a table as the lines that it takes."""
    folded = [
        [text] if len(text) <= width else fold.fold_cell(text, width)
        for text, width in zip(row, widths, strict=True)
    ]
    for parts in zip_longest(*folded, fillvalue=""):
        aligned = (t.rjust(w) if n else t.ljust(w) for t, w, n in zip(parts, widths, numeric, strict=True))
        yield _GAP.join(aligned).rstrip()


def _print_list(columns: Sequence[str], cells: Iterable[Sequence[str]], screen: int) -> None:
    """The rows of a table one below the other, a line a cell, for terminals too narrow for columns."""
    if columns[0]:
        print(columns[0], "\u2500" * len(columns[0]), sep="\n")
    for first, *rest in cells:
        texts = [first]
        for name, cell in zip(columns[1:], rest, strict=True):
            if name and cell:
                texts.append(f"  {name}: {cell}")
            elif cell:  # a number's unit
                texts[-1] += f" {cell}"
        for text in texts:
            whole, *more = fold.fold_cell(text, screen)
            more = [line for part in more for line in fold.fold_cell(part, screen - 4)]
            sys.stdout.writelines(f"{line}\n" for line in (whole, *(f"    {line}" for line in more)))


def print_tree(title: str, leaves: Iterable[tuple[str, str]]) -> None:
    """Dotted names as a tree on stdout, each leaf followed by its description."""
    if _is_quiet:
        return
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

    from ckpt_tools.execute.output.access import write_report

    if str(file) == "-":
        sys.stdout.write(text)
    else:
        write_report(
            file, text.encode("utf-8", "backslashreplace"), None if "://" in source else Path(source)
        )


def give_json(data: Any, shown: bool, file: Path | None, source: str) -> None:
    """Print it, and write it to a file that is as private as the checkpoint `source`."""
    text = json_text(data, 2)
    if file is not None:
        write_text(file, text + "\n", source)
    if shown:
        print(text)


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
