"""Wrong lines that people have named, in `named.txt`: no drawing by chance would find them all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.sites import Mutant

_ENTRY = re.compile(r"^=== (\w+): (.+)\n((?:.*\n)+?)--- becomes\n((?:(?!=== ).*\n?)*)", re.MULTILINE)


def named_mutants(repo: Path, rooms: Iterable[str]) -> tuple[list[Mutant], list[str]]:
    """All of the rooms, and a line for each whose text does not stand there once: it has to follow the code."""
    found, problems = [], []
    wanted = set(rooms)
    for room, what, *change in _ENTRY.findall(Path(__file__).with_suffix(".txt").read_text()):
        if room not in wanted:
            continue
        old, new = (text.strip("\n") for text in change)
        texts = {p: p.read_text() for p in sorted((repo / "ckpt_tools" / room).rglob("*.py"))}
        places = {p: text for p, text in texts.items() if old in text}
        if sum(text.count(old) for text in places.values()) != 1:
            problems.append(f"{what}: its text does not stand once in {room}")
            continue
        ((path, text),) = places.items()
        line = text[: text.index(old)].count("\n") + 1
        lines = range(line, line + old.count("\n") + 1)
        found.append(Mutant(str(path.relative_to(repo)), lines, what, "named", text.replace(old, new)))
    return found, problems
