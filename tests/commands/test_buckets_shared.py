"""Commands that read flat buckets have as many workers prove them as were asked for; the bytes are the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import fixture_dir

BUCKETS = "core019_llama_tp2_dp_reshardable"
COMMANDS = {
    "average": "average RUN RUN OUT",
    "strip": "strip RUN OUT",
    "stats": "stats RUN --by parameters",
    "export-hf": "export-hf RUN OUT",
    "convert": "convert RUN OUT",
    "back": "convert RUN OUT --to torch_dist",
}
TELL = """
import sys
from ckpt_tools.cli.app import run
from ckpt_tools.commands.job import read_model
start_jobs = read_model.start_jobs
def told(work, jobs, *, workers, **given):
    print("proven by", workers, file=sys.stderr)
    return start_jobs(work, jobs, workers=workers, **given)
read_model.start_jobs = told
sys.exit(run(sys.argv[1:]))
"""


def made(command: str, out: Path, *options: str) -> tuple[str, dict[str, bytes]]:
    """What is said of the proof, and every file that is written."""
    words = command.replace("RUN", str(fixture_dir(BUCKETS))).replace("OUT", str(out)).split()
    done = subprocess.run(
        [sys.executable, "-c", TELL, *words, *options, "-q"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = "\n".join(line for line in done.stderr.splitlines() if line.startswith("proven by"))
    return told, {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_workers_prove_and_write_the_same(command: str, tmp_path: Path) -> None:
    alone, files = made(command, tmp_path / "one", "--workers", "1")
    shared, same = made(command, tmp_path / "three", "--workers", "3")
    assert alone == ""
    assert set(shared.splitlines()) == {"proven by 3"}
    assert same == files


def test_slice_has_no_option_and_takes_as_many_as_help(tmp_path: Path) -> None:
    assert made("slice RUN OUT --layers 0:1", tmp_path / "out")[0] == "proven by None"
