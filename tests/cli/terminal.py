"""Commands run on a terminal of their own, as a person sees them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPO


def on_a_terminal(argv: list[str], folder: Path = REPO, **env: str) -> str:
    """What a command writes to the terminal it runs on, control sequences included."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", *argv],
        cwd=folder,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(REPO), "TERM": "xterm-256color", "COLUMNS": "100", **env},
    ) as process:
        os.close(theirs)
        data = b""
        try:
            while piece := os.read(ours, 1 << 16):
                data += piece
        except OSError:  # the terminal's other end is closed
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0, data
    return data.decode().replace("\r\n", "\n")
