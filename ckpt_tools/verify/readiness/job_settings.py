"""The settings that rules calculate with are of the kind that Megatron takes.

A command line is typed by its parser. YAML files and stored arguments are not: there a size can be a word, or so
large that no model has it. What is wrong is named once, and the rules go on without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt_tools.megatron.run_state.stored_values import COUNTED, MOST, counts
from ckpt_tools.verify.readiness.facts import Facts
from ckpt_tools.verify.report import ERROR, Check, Finding

_WORDS = ("optimizer",)
_PATTERNS = ("moe_layer_freq",)


def checked_settings(facts: Facts) -> tuple[Facts, Check]:
    """The facts without settings of another kind than Megatron takes, and what those are."""
    wrong = {name: wanted for name, wanted in map(_judged, facts.job.settings.items()) if wanted}
    sound = {name: value for name, value in facts.job.settings.items() if name not in wrong}
    args = {name: value for name, value in facts.args.items() if not _judged((name, value))[1]}
    findings = tuple(
        Finding("settings", ERROR, f"{name} is {_short(facts.job.settings[name])}", f"Megatron takes {wanted}",
                "correct it where it comes from")
        for name, wanted in sorted(wrong.items())
    )  # fmt: skip
    known = [name for name in facts.job.settings if name in {*COUNTED, *_WORDS, *_PATTERNS}]
    return replace(facts, job=replace(facts.job, settings=sound), args=args), Check(
        "settings", "settings", len(known), findings
    )


def _judged(setting: tuple[str, Any]) -> tuple[str, str]:
    """A setting's name, and what Megatron takes for it if it is something else."""
    name, value = setting
    if value is None:
        return name, ""
    if name in COUNTED and not counts(value, COUNTED[name]):
        return name, f"a whole number from {COUNTED[name]} to {MOST:,}"
    if name in _WORDS and not isinstance(value, str):
        return name, "a word"
    if name in _PATTERNS and not counts(value, 1):
        is_list = isinstance(value, list | tuple) and all(counts(one, 0) for one in value)
        return name, "" if is_list else "a whole number from 1, or a list of 0 and 1"
    return name, ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
