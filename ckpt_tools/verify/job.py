"""The settings of a training job that is about to start: from its command line, or from its YAML file.

Names are those of Megatron's arguments, with underscores. `--no-x` sets `x` to False. In a nested YAML file
(Megatron-Bridge) the section names are dropped; in Megatron-LM's test recipes `MODEL_ARGS` and `ENV_VARS` are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.catalog import documents
from ckpt_tools.errors import UsageError

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SECTIONS = ("model", "ddp", "dist", "checkpoint", "optimizer")
_NUMBER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class Job:
    """`settings` that were given, by Megatron's names; settings that were not have their program's defaults."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_bridge: bool = False

    def __bool__(self) -> bool:
        return bool(self.settings)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these settings that was given and is not None."""
        found = (self.settings.get(name) for name in names)
        return next((value for value in found if value is not None), default)

    def has(self, name: str) -> bool:
        """Whether a switch is on."""
        return bool(self.settings.get(name))


def parse_command(words: Sequence[str]) -> Job:
    """The job that a command line starts: `NAME=VALUE ... program.py --flag value ...`, or the flags alone.

    What stands before a `.py` file belongs to the launcher and is ignored, but for the environment.
    """
    settings: dict[str, Any] = {}
    environment: dict[str, str] = {}
    flag: str | None = None
    for word in words:
        assignment = _ASSIGNMENT.fullmatch(word)
        if word.endswith(".py"):
            settings, flag = {}, None
        elif word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flag = _name(name)
            if flag.startswith("no_") and not value:
                settings[flag.removeprefix("no_")] = False
            settings[flag] = _value(value) if value else True
        elif assignment and flag is None:
            environment[assignment[1]] = assignment[2]
        elif flag is not None:
            settings[flag] = _joined(settings[flag], _value(word))
    return Job(settings, environment)


def parse_yaml(text: bytes | str, name: str = "the YAML file") -> Job:
    """The job that a YAML file describes.

    Raises:
        UsageError: it is no YAML mapping.
    """
    try:
        document = documents.parse_yaml(text)
    except documents.DocumentError as error:
        raise UsageError(f"{name}: {error}") from None
    if not isinstance(document, Mapping):
        raise UsageError(f"{name}: expected a mapping of settings, found {type(document).__name__}")
    for section in ("ENV_VARS", "MODEL_ARGS"):
        if not isinstance(document.get(section, {}) or {}, Mapping):
            raise UsageError(f"{name}: expected a mapping under {section}")
    environment = {str(k): str(v) for k, v in (document.get("ENV_VARS") or {}).items()}
    is_bridge = isinstance(document.get("model"), Mapping) and any(s in document for s in _SECTIONS[1:])
    settings: dict[str, Any] = {}
    for key, value in _leaves(document.get("MODEL_ARGS", document) or {}):
        if settings.get(key) is None:
            settings[key] = value
    for key, value in list(settings.items()):
        if key.startswith("no_") and value is True:
            settings.setdefault(key.removeprefix("no_"), False)
    return Job(settings, environment, is_bridge)


def merge(first: Job, second: Job) -> Job:
    """Both jobs' settings; `second` wins."""
    return Job(
        {**first.settings, **second.settings},
        {**first.environment, **second.environment},
        first.is_bridge or second.is_bridge,
    )


def _leaves(section: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if key == "ENV_VARS":
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield _name(str(key).removeprefix("--")), value


def _name(flag: str) -> str:
    return flag.replace("-", "_")


def _value(word: str) -> Any:
    if _NUMBER.fullmatch(word):
        return int(word)
    try:
        return float(word)
    except ValueError:
        return {"true": True, "false": False, "none": None, "null": None}.get(word.lower(), word)


def _joined(before: Any, value: Any) -> Any:
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]
