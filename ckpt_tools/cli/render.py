"""What commands print: tables for people, JSON for programs.

Names, paths and values are untrusted. Every sink has one function that makes them harmless there: `escape`
for lines that a terminal or a CI log shows, `json_text` for JSON; `cli.findings` has those of Markdown, GitHub and
JUnit, `commands.convert.picture` that of SVG and HTML.

A terminal gets no line that is wider than it is, except a path or a command's word that would be useless in pieces.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from pathlib import Path

_CI_COMMAND = re.compile(r"##(?=\w*\[)")  # Azure's ##vso[ and ##[, TeamCity's ##teamcity[, wherever in a line
_UNLIMITED = 1 << 16  # columns, when nobody looks: keys must not be folded in a file
_GAP = "  "  # between the columns of a table
NARROWEST = 20  # columns: in fewer nothing is folded further
_SMALLEST = 12  # columns of a table's text that is folded
_WORDS = re.compile(r"\s*(?:`[^`]*`\S*|\S+)")  # a command in backquotes stays whole, so that it can be copied
_ARGUMENTS = re.compile(r"\s*(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+")
_PIECES = re.compile(r"[^\s./_,|=-]*(?:[./_,|=-]+|\s+|$)")
_KEY = re.compile(r"\s*\w[^/\s]*\.\w")  # paths have a slash before a dot
_NUMBER = re.compile(r"-?[\d,.]+(e[-+]\d+)?( %| \w+)?|-?(nan|inf)|-", re.IGNORECASE)
_GREEN, _YELLOW, _RED = "\x1b[32m", "\x1b[33m", "\x1b[31m"
_COLORS = {"error:": _RED, "warning:": _YELLOW, "warning": _YELLOW}  # of a line, by its first word
_is_quiet = False


def be_quiet(wanted: bool) -> None:
    """Whether this process says nothing but errors, and gives what is for programs (`--quiet`)."""
    global _is_quiet  # noqa: PLW0603  a decision about the whole process, made once by who starts it
    _is_quiet = wanted


def is_quiet() -> bool:
    """Whether it does."""
    return _is_quiet


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


def columns_of(stream: TextIO) -> int | None:
    """The width of the terminal that `stream` is, or what COLUMNS says that it is; None: it is not a terminal."""
    try:
        if not stream.isatty():
            return None
        said = os.environ.get("COLUMNS", "")
        width = (
            int(said) if said.isascii() and said.isdigit() else os.get_terminal_size(stream.fileno()).columns
        )
    except (OSError, ValueError):
        width = 0
    return max(width or 80, NARROWEST)


def fold_line(line: str, width: int) -> list[str]:
    """A line of prose in lines that begin below its first word, or below what follows a label.

    A word that is longer than a line gets a line for itself, whole: a path in pieces could not be copied. Only keys
    are folded, after their dots.
    """
    if len(line) <= width:
        return [line]
    label = re.match(r"\s*\S+(?: \S+)?  +(?=\S)", line)
    indent = len(line) - len(line.lstrip())
    hang = " " * (len(label[0]) if label and len(label[0]) <= width // 3 else indent + 2)
    pieces = list[str]()
    for word in _WORDS.findall(line):
        room = max(width - len(hang), _SMALLEST)
        pieces += _cut(word, room) if _KEY.match(word) and len(word) > room else [word]
    return _filled(pieces, width, hang)


def fold_command(line: str, width: int) -> list[str]:
    """A command line as several that a shell takes for one; a comment as several comments."""
    if len(line) <= width:
        return [line]
    if line.lstrip().startswith("#"):
        return _filled(_WORDS.findall(line), width, line[: line.index("#")] + "# ")
    end = " \\"
    hang = " " * (len(line) - len(line.lstrip()) + 2)
    words = [found[0] for found in _ARGUMENTS.finditer(line.removesuffix(end))]
    lines = _filled(words, width - len(end), hang)
    return [*(one + end for one in lines[:-1]), lines[-1] + (end if line.endswith(end) else "")]


def fold_cell(text: str, width: int) -> list[str]:
    """A cell of a table in lines: folded between words, and names that are longer than a line after their dots."""
    if len(text) <= width:
        return [text]
    words = re.findall(r"\S*\s*", text)
    return _filled([piece for word in words for piece in _cut(word, width)], width, "")


def _cut(word: str, width: int) -> list[str]:
    """A word in pieces of at most `width` columns."""
    if len(word.rstrip()) <= width:
        return [word]
    pieces = [found[0] for found in _PIECES.finditer(word) if found[0]]
    return [piece[i : i + width] for piece in pieces for i in range(0, len(piece), width)]


def _filled(pieces: Iterable[str], width: int, hang: str) -> list[str]:
    """Pieces, each with the space around it, in lines of which all but the first begin with `hang`."""
    lines = [""]
    for piece in pieces:
        if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
            lines.append(hang + piece.lstrip())
        else:
            lines[-1] += piece
    return [line.rstrip() for line in lines]


def tell(text: str = "", stream: TextIO | None = None) -> None:
    """Print text that is escaped already on stdout, or `stream`, unless the process is quiet."""
    if not _is_quiet:
        _write(text, stream or sys.stdout)


def tell_verdict(text: str, is_good: bool) -> None:
    """Print the line that answers: green or red on a terminal."""
    if not _is_quiet:
        _write(text, sys.stdout, _GREEN if is_good else _RED)


def _write(text: str, stream: TextIO, color: str = "") -> None:
    width = columns_of(stream)
    lines = text.split("\n")
    if width is not None:
        colored = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        folded = list[str]()
        for line in lines:
            paint = color or _COLORS.get(line.lstrip().partition(" ")[0], "") if colored else ""
            parts = fold_line(line, width)
            folded += [f"{paint}{part}\x1b[0m" if paint and part else part for part in parts]
        lines = folded
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
    width = columns_of(sys.stdout)
    for line in text.split("\n"):
        print("\n".join([line] if width is None else fold_command(line, width)))


def complain(error: str) -> None:
    """An error, of one or several lines, on stderr."""
    _write(escape_lines(error), sys.stderr)


def say(note: str) -> None:
    """A note on stderr."""
    tell(note, sys.stderr)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", most: int | None = None
) -> None:
    """A table on stdout, of its first `most` rows; numbers are right-aligned, what is too long is folded."""
    if _is_quiet:
        return
    values = [list(row) for row in rows]
    if most is not None and len(values) > most:
        print_table(columns, values[:most], title)
        tell(f"... and {len(values) - most:,} more (--json lists all)")
        return
    cells = [[f"{v:,}" if isinstance(v, int) else escape(str(v)) for v in row] for row in values]
    numeric = [bool(values) and all(isinstance(row[i], int) for row in values) for i in range(len(columns))]
    tell(f"\n{title}" if title else "")
    screen = columns_of(sys.stdout) if cells else None
    room = _UNLIMITED if screen is None else screen - len(_GAP) * (len(columns) - 1)
    widths = column_widths(columns, cells, room)
    if widths is None:
        _print_list(columns, cells, screen or _UNLIMITED)
        return
    is_bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for index, row in enumerate([columns, ["\u2500" * width for width in widths], *cells]):
        folded = [fold_cell(text, width) for text, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*folded, fillvalue=""):
            aligned = (
                t.rjust(w) if n else t.ljust(w) for t, w, n in zip(parts, widths, numeric, strict=True)
            )
            line = _GAP.join(aligned).rstrip()
            print(f"\x1b[1m{line}\x1b[0m" if is_bold and not index else line)


def column_widths(columns: Sequence[str], cells: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """The widths at which a table has at most `room` columns, its numbers whole; None: there are none."""
    widths, least = [], []
    for column, *values in zip(columns, *cells, strict=True):
        title = max((len(word) for word in column.split()), default=0)
        widest = max(map(len, values), default=0)
        widths.append(max(widest, len(column)))
        are_numbers = all(map(_NUMBER.fullmatch, values))
        least.append(max(widest, title) if are_numbers else min(widths[-1], max(title, _SMALLEST)))
    if sum(least) > room:
        return None
    while sum(widths) > room:
        _, index = max((have - low, i) for i, (have, low) in enumerate(zip(widths, least, strict=True)))
        widths[index] -= 1
    return widths


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
            whole, *more = fold_cell(text, screen)
            more = [line for part in more for line in fold_cell(part, screen - 4)]
            sys.stdout.writelines(f"{line}\n" for line in (whole, *(f"    {line}" for line in more)))


def print_tree(title: str, leaves: Iterable[tuple[str, str]]) -> None:
    """Dotted names as a tree on stdout, each leaf followed by its description."""
    if _is_quiet:
        return
    from rich.console import Console
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
    width = None if sys.stdout.isatty() else _UNLIMITED
    Console(highlight=False, markup=False, emoji=False, width=width).print(root)


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


def json_lines(head: dict[str, Any], lists: dict[str, Iterator[Any]]) -> Iterator[str]:
    """The text of one JSON object piece by piece: `head`'s members, then lists, an item at a time."""
    yield json_text(head)[:-2]
    for name, items in lists.items():
        yield f",\n {json.dumps(name)}: ["
        separator = "\n  "
        for item in items:
            yield separator + json_text(item, None)
            separator = ",\n  "
        yield "\n ]"
    yield "\n}\n"
