"""The pieces of family files (pieces.yaml): groups of rules, fields and demands that families name.

Texts of rules name what differs between families as `<gate>`; `names` of a file say what it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_tools.megatron.huggingface.families.file_places import (
    Place,
    Problems,
    RuleSource,
    not_one_of,
    parse_rule_source,
)

NAMED = re.compile(r"<(\w*)>")


@cache
def pieces() -> RuleSource:
    """The pieces of this package."""
    path = Path(__file__).with_name("pieces.yaml")
    return parse_rule_source(path.read_bytes(), path.name, ours=True)


def parts_of(
    said: Any, kind: str, at: Place, problems: Problems, inside: tuple[str, ...] = ()
) -> Iterator[tuple[Any, Place]]:
    """The parts of a list, with those of every piece that it names, in order; a mapping is a list of one."""
    if isinstance(said, Mapping):
        yield said, at
        return
    if not isinstance(said, list):
        problems.append(
            f"expected a mapping, or a list of mappings and names of pieces, found {said!r} @ {at}"
        )
        return
    known = pieces().data[kind]
    for number, part in enumerate(said):
        place = at / number
        if not isinstance(part, str):
            yield part, place
        elif part not in known:
            problems.append(f"{not_one_of(part, f'pieces of {kind}', list(known))} @ {place}")
        elif part in inside:
            problems.append(f"the piece {part!r} contains itself @ {place}")
        else:
            yield from parts_of(known[part], kind, pieces().top / kind / part, problems, (*inside, part))


class Names:
    """What `<name>` stands for in a file's texts; `used` are those that were asked for."""

    def __init__(self, own: Mapping[str, str]) -> None:
        self.values: Mapping[str, str] = {**pieces().data["names"], **own}
        self.used: set[str] = set()

    def fill(self, text: str, at: Place, problems: Problems) -> str:
        """The text with all names replaced."""

        def value(match: re.Match[str]) -> str:
            name = match.group(1)
            self.used.add(name)
            if name not in self.values:
                problems.append(f"{not_one_of(f'<{name}>', 'names', self.values)} @ {at}")
            return self.values.get(name, "")

        return NAMED.sub(value, text)
