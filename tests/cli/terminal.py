"""The program on a terminal of its own, as a person sees it, or with other streams."""

import fcntl
import gc
import os
import pty
import struct
import sys
import termios
import warnings
from importlib import import_module
from pathlib import Path

import ckpt_tools
from ckpt_tools.__main__ import main
from ckpt_tools.cli.commands import MODULES
from tests.conftest import REPO

_LOADED = [
    *(getattr(ckpt_tools, name) for name in ckpt_tools.__all__),
    *(import_module(f"ckpt_tools.cli.verbs.{module}") for module in MODULES.values()),
    *map(import_module, ("rich.progress", "ckpt_tools.cli.progress", "ckpt_tools.cli.commands")),
]  # once, and not by every fork


def program(argv: list[str], out: int, err: int, folder: Path = REPO, **env: str) -> int:
    """The process id of the program: a fork of this process, in which the modules are imported already.

    `out` and `err` are descriptors for its stdout and stderr.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch may have left threads here
        pid = os.fork()
    if pid:
        return pid
    code: object = 70
    gc.freeze()  # or the first collection copies every page that the two share
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(folder)
        os.environ.update(env)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["checkpoint-inspector", *argv]
        main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        os._exit(code if isinstance(code, int) else 70)


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
    pid = program(argv, theirs, theirs, folder, **{"TERM": "xterm-256color", "COLUMNS": "100", **env})
    os.close(theirs)
    data = b""
    try:
        while piece := os.read(ours, 1 << 16):
            data += piece
    except OSError:  # the terminal's other end is closed
        pass
    finally:
        os.close(ours)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in codes, data
    return data.decode().replace("\r\n", "\n")
