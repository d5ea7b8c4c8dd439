"""The modules that a quantization_config names: as text, or as patterns of a config.json that a stranger wrote.

A pattern is only tried where it cannot run away: letters, dots, groups, alternatives and a few `.*`, which is what
published models have. Others are not tried, and said to be so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt_tools.errors import MappingError

_CHEAP = re.compile(r"(?:[\w.$^|()-]|\.\*|\\[.\w])*")
_MOST_STARS = 3
_LONGEST = 500  # characters


@dataclass(frozen=True, slots=True)
class Patterns:
    """Names of modules: whole ones, ends of them, and what a pattern matches; with what config.json says for each."""

    names: frozenset[str] = frozenset()
    ends: tuple[str, ...] = ()
    compiled: tuple[tuple[str, re.Pattern[str]], ...] = ()
    unchecked: tuple[str, ...] = ()

    def listing(self, module: str) -> str | None:
        """What names this module, or None."""
        if module in self.names:
            return module
        ending = next((end for end in self.ends if module.endswith(end)), None)
        return ending or next((said for said, pattern in self.compiled if pattern.match(module)), None)


def modules_left_alone(said: object) -> Patterns:
    """`modules_to_not_convert` as transformers reads it: a pattern up to a module's border, or the end of a name."""
    names = _texts(said, "modules_to_not_convert")
    return _compile({name: rf"(?:{name})(?:(?<=\.)|(?=\.|$))" for name in names}, frozenset(), tuple(names))


def targets_ignored(said: object) -> Patterns:
    """`ignore` of compressed-tensors: whole names, and patterns behind `re:`."""
    names = _texts(said, "ignore")
    plain = frozenset(name for name in names if not name.startswith("re:"))
    return _compile({name: name[3:] for name in names if name not in plain}, plain, ())


def _compile(patterns: dict[str, str], names: frozenset[str], ends: tuple[str, ...]) -> Patterns:
    compiled, unchecked = [], []
    for said, pattern in patterns.items():
        text = said.removeprefix("re:")
        cheap = len(text) <= _LONGEST and text.count("*") <= _MOST_STARS and _CHEAP.fullmatch(text)
        try:
            compiled += [(said, re.compile(pattern))] if cheap else []
        except re.error:
            cheap = None
        unchecked += [] if cheap else [said]
    return Patterns(names, ends, tuple(compiled), tuple(unchecked))


def _texts(said: object, field: str) -> list[str]:
    if not isinstance(said, list | tuple) or not all(isinstance(name, str) and name for name in said):
        raise MappingError(f"config.json: {field} is {said!r}, expected a list of module names")
    return list(said)
