"""The launch of a preflight that is ready."""

from __future__ import annotations

from ckpt_tools.commands.check.launch import Launch
from ckpt_tools.commands.check.preflight import Preflight


def launch_of(found: Preflight) -> Launch:
    """The command that starts the job, which must be there."""
    assert found.launch is not None
    return found.launch
