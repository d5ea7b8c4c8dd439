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
from pathlib import Path
from typing import Any, TextIO

import typer

from ckpt_tools import __version__
from ckpt_tools.cli.commands import Group, removed_option
from ckpt_tools.cli.manual import closing
from ckpt_tools.cli.render import be_quiet, complain, escape_lines, say
from ckpt_tools.credentials import hidden
from ckpt_tools.errors import CkptError, Interrupted, UsageError, as_ckpt_error
from ckpt_tools.redaction import redacted

_GARBAGE = 50_000  # new objects until a collection; Python's 700 are met hundreds of times while modules are imported
app = typer.Typer(
    name="checkpoint-inspector",
    cls=Group,
    help="Inspect, check, convert and edit Megatron, Megatron-FSDP, PyTorch DCP and Hugging Face checkpoints.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=closing(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


_LIBRARIES = ("torch", "numpy", "typer", "rich", "orjson", "safetensors", "isal", "fsspec", "pyyaml")
_OPTIONAL_LIBRARIES = ("botocore", "gcsfs", "multi-storage-client", "megatron-core", "transformers")
# A list of names, not of prefixes: people paste the output into public issues.
_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "CKPT_TOOLS_PORT", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NUM_NODES",
    "SLURM_RESTART_COUNT", "NO_COLOR", "TERM", "COLUMNS", "TMPDIR",
    "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONOPTIMIZE", "LD_PRELOAD", "AWS_REGION", "AWS_PROFILE",
    "AWS_ENDPOINT_URL", "MSC_CONFIG",
)  # fmt: skip


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", "-V", help="Print the version, and those of the libraries."
    ),
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="The versions, the machine and its settings, for a bug report."
    ),
    for_agents: bool = typer.Option(
        False, "--for-agents", help="Print what an automated assistant needs to know (Markdown)."
    ),
) -> None:
    if version or (verbose and context.invoked_subcommand is None):
        _print_versions(verbose)
    elif for_agents:
        sys.stdout.write((Path(__file__).parent.parent / "for-agents.md").read_text())
    elif context.invoked_subcommand is None:
        context.fail("Missing command.")
    else:
        return
    raise typer.Exit


def _print_versions(verbose: bool) -> None:
    """One name and value a line. An optional library is listed only if it is installed."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    rows = {"ckpt_tools": __version__, "python": platform.python_version()}
    for name in (*_LIBRARIES, *_OPTIONAL_LIBRARIES):
        try:
            rows[name] = installed_version(name)
        except PackageNotFoundError:
            if name in _LIBRARIES:
                rows[name] = "not installed"
    if verbose:
        from ckpt_tools.formats.storage.crc import crc32
        from ckpt_tools.human import human_bytes

        rows["platform"] = platform.platform()
        rows["processors"] = str(len(os.sched_getaffinity(0)))
        rows["memory"] = human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        rows["crc32"] = crc32.__module__
        rows |= {name: redacted(os.environ[name]) for name in _VARIABLES if name in os.environ}
    for name, value in rows.items():
        print(name, escape_lines(value))


def main(argv: list[str] | None = None) -> None:
    """Run the command line and leave the process with the exit code of the result."""
    # Once numpy is imported, its BLAS has a thread a core wait for matrices, busily at first. No command has any.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(_GARBAGE)
    _fill_closed_streams()
    # glibc keeps blocks of up to 16 MiB that are freed from now on: its thresholds grow with what is freed, see
    # mallopt(3). Otherwise the arrays of every tile get new pages from the system.
    bytes(16 << 20)  # freed at once, and never touched
    sys.stdout, sys.stderr = _unbreakable(sys.stdout), _unbreakable(sys.stderr, OSError)
    code = run(argv)
    _drop_unwritten()
    sys.exit(code)


class _Pipe(io.FileIO):
    """A stream that takes all that is written, also after its reader has gone: the exit code is still a verdict."""

    forgiven: type[OSError]  # all, of stderr: a message that finds no place
    opened: TextIO  # which closes the descriptor when nobody holds it

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except self.forgiven:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def _unbreakable(stream: TextIO, forgiven: type[OSError] = BrokenPipeError) -> TextIO:
    """As `stream`: neither a closed pipe nor what the locale cannot spell must end a command."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    pipe = _Pipe(stream.fileno(), "w", closefd=False)
    pipe.opened, pipe.forgiven = stream, forgiven
    return io.TextIOWrapper(
        pipe if stream.write_through else io.BufferedWriter(pipe),
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


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


def run(argv: list[str] | None = None) -> int:
    """The exit code of one command line; errors go to stderr as one message."""
    try:
        words = sys.argv[1:] if argv is None else argv
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)  # the same line of one place is said once
            warnings.showwarning = _show_warning
            code = app(args=[hidden(word) for word in words], standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as stop:
        return stop.exit_code
    except (Exception, KeyboardInterrupt) as error:
        return _explain(error)
    finally:
        be_quiet(False)  # --quiet is of this command line alone
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
    error = as_ckpt_error(error)
    if isinstance(error, CkptError):
        complain(f"error: {error}")
        return error.exit_code
    if hasattr(
        error, "format_message"
    ):  # click's usage errors; typer has its own copy of click in some versions
        context = getattr(error, "ctx", None)
        hint = f"\n{context.get_usage()}\nTry '{context.command_path} --help'." if context else ""
        complain(redacted(f"error: {error.format_message()}{removed_option(error)}{hint}"))
        return UsageError.exit_code
    print(escape_lines(redacted("".join(traceback.format_exception(error)).rstrip())), file=sys.stderr)
    return CkptError.exit_code
