"""Where torchtitan keeps its checkpoints: `FOLDER/step-N`, without a tracker.

It goes on from the highest number that is whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpt_tools.formats.dcp import METADATA
from ckpt_tools.formats.files import Files
from ckpt_tools.formats.safetensors import INDEX_FILE, SINGLE_FILE

STEP_FOLDER = re.compile(r"step-(\d{1,18})")


def step_number(name: str) -> int | None:
    """The step that a folder's name tells."""
    match = STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def latest_step(files: Files, names: Sequence[str]) -> str | None:
    """The folder that torchtitan would load, None where these are not (all) its folders or none is whole."""
    steps = {name: step for name in names if (step := step_number(name)) is not None}
    if len(steps) != len(names):
        return None
    for name in sorted(steps, key=lambda name: steps[name], reverse=True):
        if any(files.exists(f"{name}/{mark}") for mark in (METADATA, INDEX_FILE, SINGLE_FILE)):
            return name
    return None
