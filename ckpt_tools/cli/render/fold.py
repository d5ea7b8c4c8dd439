"""Text in as many columns as a terminal has: lines folded between words, names in tables at their dots."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TextIO

_WORDS = re.compile(r"\s*(?:`[^`]*`\S*|\S+)")  # a command in backquotes stays whole, so that it can be copied
_ARGUMENTS = re.compile(r"\s*(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+")
_PIECES = re.compile(r"[^\s./_,|=-]*(?:[./_,|=-]+|\s+|$)")
_KEY = re.compile(r"\s*\w[^/\s]*\.\w")  # paths have a slash before a dot
_NUMBER = re.compile(r"-?[\d,.]+(e[-+]\d+)?( %| \w+)?|-?(nan|inf)|-", re.IGNORECASE)
NARROWEST = 20  # columns: in fewer nothing is folded further
_SMALLEST = 10  # columns that text which can be folded is given at least


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

    A word that is longer than a line stands on one of its own, whole: a path in pieces could not be copied. Only keys
    are folded, after their dots.
    """
    if len(line) <= width:
        return [line]
    indent = len(line) - len(line.lstrip())
    label = re.match(r"\s*\S+(?: \S+)?  +(?=\S)", line)
    hang = len(label[0]) if label and len(label[0]) <= width // 3 else indent + 2
    return _filled(_WORDS.findall(line), width, " " * hang)


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


def _filled(words: Sequence[str], width: int, hang: str) -> list[str]:
    """Words, each with the space before it, in lines."""
    lines = [""]
    for word in words:
        if not lines[-1] or len(lines[-1] + word) <= width:
            lines[-1] += word
        else:
            lines.append(hang + word.lstrip())
        if len(lines[-1]) > width and _KEY.match(word):
            start = lines.pop().removesuffix(word.lstrip())
            lines += (start + part for part in fold_cell(word.lstrip(), max(width - len(start), _SMALLEST)))
    return lines


def fold_cell(text: str, width: int) -> list[str]:
    """A cell of a table in lines: folded between words, and names that are longer than a line after their dots."""
    lines = [""]
    for word in re.findall(r"\S*\s*", text):
        for piece in [word] if len(word.rstrip()) <= width else _pieces(word):
            if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
            while len(lines[-1].rstrip()) > width:
                lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def _pieces(text: str) -> list[str]:
    return [found[0] for found in _PIECES.finditer(text) if found[0]]


def column_widths(columns: Sequence[str], cells: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """The widths at which a table has at most `room` columns, its numbers whole; None: there are none."""
    widths, least = [], []
    for column, values in zip(columns, zip(*cells, strict=True), strict=True):
        widest = max(map(len, values))
        widths.append(max(widest, len(column)))
        title = max((len(word) for word in column.split()), default=0)
        if all(map(_NUMBER.fullmatch, values)):
            least.append(max(widest, title))
        else:
            whole = max(len(piece.rstrip()) for value in values for piece in _pieces(value))
            least.append(min(widths[-1], max(whole, title, _SMALLEST)))
    if sum(least) > room:
        return None
    while sum(widths) > room:
        _, index = max((have - low, i) for i, (have, low) in enumerate(zip(widths, least, strict=True)))
        widths[index] -= 1
    return widths
