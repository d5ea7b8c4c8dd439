"""Outcomes and signals to exit codes, stdout and stderr kept apart, and a start that loads nothing heavy."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
import typer
import yaml

import ckpt_tools
from ckpt_tools import __version__, errors
from ckpt_tools.cli import app as module
from ckpt_tools.cli.app import run
from ckpt_tools.cli.commands import MODULES
from tests.cli.terminal import program
from tests.conftest import LLAMA, REPO, RUN, fixture_dir
from tests.damage import flip_bit, payload_of


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


RAISED = [
    (errors.UsageError("u"), 2, "error: u\n"),
    (errors.UnsupportedCheckpointError("s"), 3, "error: s\n"),
    (errors.CorruptCheckpointError("c"), 4, "error: c\n"),
    (errors.MappingError("m"), 5, "error: m\n"),
    (errors.VerificationError("v"), 6, "error: v\n"),
    (errors.StorageError("d"), 7, "error: d\n"),
    (errors.Terminated("t"), 143, "error: t\n"),
    (KeyboardInterrupt(), 130, "error: interrupted; nothing was published.\n"),
    (typer.Abort(), 130, "error: interrupted; nothing was published.\n"),
    (OSError(28, "No space left on device", "x"), 7, "error: [Errno 28] No space left on device: 'x'\n"),
    (typer.BadParameter("bad"), 2, "error: Invalid value: bad\n"),
]


@pytest.mark.parametrize(("error", "code", "message"), RAISED, ids=lambda value: type(value).__name__)
def test_exit_codes(error, code, message, monkeypatch, capsys):
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(module, "app", fail)
    assert run([]) == code
    assert tuple(capsys.readouterr()) == ("", message)


def test_defects_show_their_traceback(monkeypatch, capsys):
    monkeypatch.setattr(module, "app", lambda **_: 1 // 0)
    assert run([]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_codes_of_commands_are_kept(monkeypatch):
    monkeypatch.setattr(module, "app", lambda **_: 1)
    assert run([]) == 1


def test_version(capsys):
    assert run(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"ckpt_tools {__version__}"
    assert {"python", "torch", "numpy", "typer", "isal"} <= {line.split()[0] for line in lines}


def test_what_a_bug_report_needs(monkeypatch, capsys):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-show")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://me:do-not-show@store:9000/x@y")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert run(["--version", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert {"SLURM_NTASKS 16", "AWS_ENDPOINT_URL https://***@store:9000/x@y"} <= set(out.splitlines())
    assert "\ncrc32 " in out
    assert "do-not-show" not in out


def test_the_document_for_agents_is_printed_whole(capsys):
    """Its front matter must be what a reader of skills accepts."""
    text = (Path(ckpt_tools.__file__).parent / "for-agents.md").read_text()
    assert run(["--for-agents"]) == 0
    assert capsys.readouterr().out == text
    front = yaml.safe_load(text.split("---\n")[1])
    assert front.keys() == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9-]{1,64}", front["name"])
    assert 100 < len(front["description"]) <= 1024


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "Missing command"),
        (["inspectt"], "'inspectt'"),
        (["inspect"], "checkpoint"),
        (["inspect", "x", "--nope"], "--nope"),
        (["stats", "x", "--threads", "two"], "--threads"),
    ],
)
def test_usage_errors(argv, part, capsys):
    """The wording is typer's, and differs between its versions."""
    assert run(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert part.lower() in captured.err.lower()
    assert "--help" in captured.err


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--version", "--verbose"], ["inspect", str(fixture_dir(LLAMA))], ["inspect", "--help"]],
)
def test_start_is_light(argv):
    """No torch and no numpy, neither for help nor to inspect."""
    program = (
        f"import sys; from ckpt_tools.cli.app import run; print(run({argv!r}), *sys.modules, file=sys.stderr)"
    )
    code, *modules = python("-c", program).stderr.split()
    assert code == "0"
    assert not {"torch", "numpy", "fsspec", "orjson"} & set(modules)


def test_a_command_is_imported_alone():
    program = "import sys; from ckpt_tools.cli.app import run; run(['ls', '-h']); print(*sys.modules)"
    loaded = {name for name in python("-c", program).stdout.split() if name.startswith("ckpt_tools.cli.")}
    assert "ckpt_tools.cli.verbs.look" in loaded
    assert not loaded & {f"ckpt_tools.cli.verbs.{module}" for module in MODULES.values() if module != "look"}


def test_numpy_starts_no_threads():
    program = (
        "import os, sys; sys.argv[1:] = {!r}; from ckpt_tools.cli.app import main\ntry: main()\n"
        "finally: print(len(os.listdir('/proc/self/task')), 'numpy' in sys.modules, file=sys.stderr)"
    ).format(["print-tensor", str(fixture_dir(LLAMA)), "decoder.final_layernorm.weight", "--stats"])
    assert python("-c", program).stderr.split() == ["1", "True"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_locale_cannot_spell_is_escaped(encoding):
    found = python("-m", "ckpt_tools", "inspect", str(fixture_dir(LLAMA)), PYTHONIOENCODING=encoding)
    assert (found.returncode, found.stderr) == (0, "")
    assert r"\u2500\u2500" in found.stdout


def test_module():
    assert python("-m", "ckpt_tools", "--version").stdout.startswith(f"ckpt_tools {__version__}\n")


@pytest.mark.parametrize("is_closed", ["stdout", "both"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("inspect --json A", 0),
        ("ls A", 0),
        ("verify B --content", 1),
        ("verify B --content --json", 1),
        ("diff A B --json", 1),
        ("preflight A -- python x.py", 1),
        ("inspect nowhere", 3),
        ("inspect", 2),
    ],
)
def test_a_closed_pipe_changes_no_verdict(words, code, is_closed, tmp_path):
    (tmp_path / "A").symlink_to(fixture_dir(LLAMA))
    root = copytree(fixture_dir(LLAMA), tmp_path / "B")
    path, at, _ = payload_of(root, "decoder.final_layernorm.weight", (0,))
    flip_bit(path, at)
    reader, writer = os.pipe()
    os.close(reader)
    with open(tmp_path / "err", "wb") as err, open(writer, "wb") as pipe:
        errors = pipe if is_closed == "both" else err
        pid = program(words.split(), pipe.fileno(), errors.fileno(), tmp_path)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert b"Traceback" not in (tmp_path / "err").read_bytes()


# Looked for when a module is first imported; the signal comes just then.
PROGRAM = """
import os, runpy, signal, sys
module, number, heard = sys.argv[1], int(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)
            assert heard == "ignored", "too late"

if heard == "ignored":
    signal.signal(number, signal.SIG_IGN)
sys.meta_path.insert(0, Finder())
runpy.run_module("ckpt_tools", run_name="__main__", alter_sys=True)
"""
LATE = (
    "typer", "ckpt_tools.cli", "ckpt_tools.cli.app", "ckpt_tools.errors", "ckpt_tools.cli.commands",
    "ckpt_tools.cli.verbs.convert", "ckpt_tools.commands.convert.to_dtensors", "numpy",
    "ckpt_tools.execute.output.local_output",
)  # fmt: skip


def start(module: str, number: int, heard: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [module, str(int(number)), heard, "convert", str(RUN), str(folder / "out")]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "number", "code", "told"),
    [(module, signal.SIGINT, 130, "interrupted; nothing was published.") for module in LATE]
    + [(module, signal.SIGTERM, 143, "terminated.") for module in LATE[::4]],
)
def test_a_signal_while_modules_are_imported(module, number, code, told, tmp_path):
    done = start(module, number, "heard", tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (code, f"error: {told}\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_so(number, tmp_path):
    """As in what a shell starts in the background, or `nohup`."""
    done = start("typer", number, "ignored", tmp_path)
    assert done.returncode == 0 and done.stderr == "" and (tmp_path / "out").is_dir()


def test_the_installed_program_begins_there():
    text = (REPO / "pyproject.toml").read_text()
    assert text.count('= "ckpt_tools.__main__:main"') == 2
