"""Commands run on a terminal of their own, as a person sees them."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.conftest import REPO


def on_a_terminal(
    argv: list[str], folder: Path = REPO, columns: int = 0, codes: tuple[int, ...] = (0,), **env: str
) -> str:
    """What a command writes to the terminal it runs on, control sequences included.

    The terminal has `columns`; if none are given the environment says how many.
    """
    ours, theirs = pty.openpty()
    if columns:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
        env["COLUMNS"] = ""
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
    assert process.returncode in codes, data
    return data.decode().replace("\r\n", "\n")
