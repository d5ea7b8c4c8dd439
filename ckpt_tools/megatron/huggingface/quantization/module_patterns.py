"""The modules that a quantization_config names: as text, or as patterns of a config.json that a stranger wrote.

A pattern is only tried where it cannot run away: letters, dots, groups, alternatives and a few `.*`, which is what
published models have. Others are not tried, and said to be so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt_tools.errors import MappingError

_PLAIN = re.compile(r"[\w.-]*[\w-]")
_CHEAP = re.compile(r"(?:[\w.$^|()-]|\.\*|\\[.\w])*")
_MOST_STARS = 3
_LONGEST = 500  # characters


@dataclass(frozen=True, slots=True)
class Patterns:
    """Names of modules, with what config.json says for each pattern; long lists cost no more than short ones."""

    names: frozenset[str] = frozenset()
    inside: bool = False  # a name stands for the modules inside it too
    ends: tuple[str, ...] = ()
    compiled: tuple[tuple[str, re.Pattern[str]], ...] = ()
    unchecked: tuple[str, ...] = ()

    def listing(self, module: str) -> str | None:
        """What names this module, or None."""
        name = module
        while name:
            if name in self.names:
                return name
            name = name.rpartition(".")[0] if self.inside else ""
        if module.endswith(self.ends):
            return next(end for end in self.ends if module.endswith(end))
        return next((said for said, pattern in self.compiled if pattern.match(module)), None)


def modules_left_alone(said: object) -> Patterns:
    """`modules_to_not_convert` as transformers reads it: a pattern up to a module's border, or the end of a name."""
    texts = _texts(said, "modules_to_not_convert")
    names = frozenset(text for text in texts if _PLAIN.fullmatch(text))
    patterns = {text: rf"(?:{text})(?:(?<=\.)|(?=\.|$))" for text in texts if not _PLAIN.fullmatch(text)}
    return Patterns(names, True, tuple(texts), *_compile(patterns))


def targets_ignored(said: object) -> Patterns:
    """`ignore` of compressed-tensors: whole names, and patterns behind `re:`."""
    texts = _texts(said, "ignore")
    patterns = {text: text.removeprefix("re:") for text in texts if text.startswith("re:")}
    return Patterns(frozenset(texts) - patterns.keys(), False, (), *_compile(patterns))


def _compile(patterns: dict[str, str]) -> tuple[tuple[tuple[str, re.Pattern[str]], ...], tuple[str, ...]]:
    """The patterns that are safe to try, and what config.json says for the others."""
    compiled, unchecked = [], []
    for said, pattern in patterns.items():
        tried = re.compile(pattern) if cheap_pattern(said.removeprefix("re:")) else None
        compiled += [(said, tried)] if tried else []
        unchecked += [] if tried else [said]
    return tuple(compiled), tuple(unchecked)


def cheap_pattern(text: str) -> re.Pattern[str] | None:
    """The pattern, compiled, if it is one and cannot run away."""
    if len(text) > _LONGEST or text.count("*") > _MOST_STARS or not _CHEAP.fullmatch(text):
        return None
    try:
        return re.compile(text)
    except re.error:
        return None


def _texts(said: object, field: str) -> list[str]:
    if not isinstance(said, list | tuple) or not all(isinstance(name, str) and name for name in said):
        raise MappingError(f"config.json: {field} is {said!r}, expected a list of module names")
    return list(said)
