"""What somebody meant who wrote a name or a glob that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from ckpt_tools.errors import UsageError

_CLOSE = 3
_COMPARED = 20_000  # names; similarity costs some 20 us each


def close_names(wanted: str, names: Iterable[str]) -> list[str]:
    """Up to three names that hold `wanted`, a name or a glob, or else are spelled much like it."""
    names = list(names)
    letters = wanted.strip("*")
    inside = [name for name in names if letters and letters in name][:_CLOSE]
    return inside or difflib.get_close_matches(wanted, names[:_COMPARED], n=_CLOSE)


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """Globs that match none of `names`, each with the names that were perhaps meant."""
    names = list(names)
    return {
        pattern: close_names(pattern, names)
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    }


def refuse_unmatched(option: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Nothing, unless a glob of an option that chooses, or leaves out, matches none of `names`.

    Raises:
        UsageError: one does; with the names that were perhaps meant.
    """
    for line in unmatched_lines(option, patterns, names):
        raise UsageError(line)


def unmatched_lines(option: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """What to say of every glob of an option that matches none of `names`."""
    return [
        f"{option} {pattern!r} matches nothing" + (f"; did you mean {', '.join(close)}?" if close else "")
        for pattern, close in unmatched(patterns, names).items()
    ]
