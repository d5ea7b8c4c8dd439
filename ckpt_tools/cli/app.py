"""The command line: one Typer app, and `main`, which turns every outcome into an exit code.

stdout carries a command's result, stderr everything else. `cli.commands` names the module of each command; its body
fills options, calls one function of the room `commands`, and prints what that returns.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import traceback
import warnings
from typing import Any

import typer

from ckpt_tools.cli.commands import Group
from ckpt_tools.cli.manual import closing
from ckpt_tools.cli.render import be_quiet, complain, escape_lines, say
from ckpt_tools.credentials import hidden, redacted
from ckpt_tools.errors import CkptError, Interrupted, StorageError, UsageError

_GARBAGE = 50_000  # new objects until a collection; Python's 700 are met hundreds of times while modules are imported
REMOVED = {
    "--like-source": "is no longer an option: Megatron does not load masters that are stored as remainders",
    "--keep-states": "is no longer an option: no job loads such states; keep the source for the way back",
}

app = typer.Typer(
    name="checkpoint-inspector",
    cls=Group,
    help="Inspect, convert, verify and redistribute Megatron torch_dist and Megatron-FSDP fsdp_dtensor checkpoints.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=closing(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from ckpt_tools.cli import environment

        environment.print_versions()
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version, and those of the libraries.",
    ),
) -> None:
    pass


def main(argv: list[str] | None = None) -> None:
    """Run the command line and leave the process with the exit code of the result."""
    # Once numpy is imported, its BLAS has a thread a core wait for matrices, busily at first. No command has any.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(_GARBAGE)
    _fill_closed_streams()
    _keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the locale cannot spell must not end a command
            stream.reconfigure(errors="backslashreplace")
    code = run(argv)
    _drop_unwritten()
    sys.exit(code)


def _fill_closed_streams() -> None:
    """Let what was closed by `>&-` lead nowhere, so that no file that is opened gets the number of stdout."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for as long as the process lives


def _drop_unwritten() -> None:
    """Keep the interpreter from failing once more, when it ends, on output that could not be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _keep_freed_memory() -> None:
    """Let glibc keep blocks of up to 16 MiB that are freed: its thresholds grow with what is freed, see mallopt(3).

    Otherwise the arrays of every tile get all their pages from the system anew.
    """
    bytes(16 << 20)  # freed at once, and never touched


def run(argv: list[str] | None = None) -> int:
    """The exit code of one command line; errors go to stderr as one message."""
    try:
        words = sys.argv[1:] if argv is None else argv
        be_quiet(False)  # whatever an earlier command line of this process asked for
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            code = app(args=[hidden(word) for word in words], standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as stop:
        return stop.exit_code
    except (BrokenPipeError, SystemExit) as stop:
        if not isinstance(stop, BrokenPipeError) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        # Whoever reads stdout has seen enough (click makes an exit of it); nothing must be flushed into it later.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return _explain(error)
    return code if isinstance(code, int) else 0


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **_more: Any
) -> None:
    """What the library warns of, once for all ranks; others speak as they do."""
    from ckpt_tools.cli.progress import is_first_rank

    if category is not UserWarning:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))
    elif is_first_rank():
        say(escape_lines(f"warning: {message}"))


def _explain(error: BaseException) -> int:
    """Print an error the way its kind asks for and return its exit code."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        error = Interrupted("interrupted; nothing was published.")
    elif isinstance(error, OSError):
        error = StorageError(str(error))
    elif isinstance(error, UnicodeEncodeError):
        error = UsageError(f"{error.object!r} is not Unicode text, so nothing can have this name.")
    elif isinstance(error, MemoryError):
        error = StorageError("there is not enough memory for this. Nothing was published.")
    elif isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        error = StorageError(
            "the system starts no more threads. Ask for fewer (--threads 1 --workers 1), or see `ulimit -u` and the "
            "control group's pids.max. Nothing was published."
        )
    if isinstance(error, CkptError):
        complain(f"error: {error}")
        return error.exit_code
    if hasattr(
        error, "format_message"
    ):  # click's usage errors; typer has its own copy of click in some versions
        context = getattr(error, "ctx", None)
        hint = f"\n{context.get_usage()}\nTry '{context.command_path} --help'." if context else ""
        name = getattr(error, "option_name", "")
        message = f"{name} {REMOVED[name]}" if name in REMOVED else error.format_message()
        complain(redacted(f"error: {message}{hint}"))
        return UsageError.exit_code
    print(escape_lines(redacted("".join(traceback.format_exception(error)).rstrip())), file=sys.stderr)
    return CkptError.exit_code
