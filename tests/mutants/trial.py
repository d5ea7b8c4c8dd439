"""One mutant at a time in a copy of the repository: do the tests that run its line notice?"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.conftest import REPO
from tests.mutants.sites import Mutant

_PARTS = (
    "ckpt_tools",
    "tests",
    "example-scripts",
    ".github",
    ".ci",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
)


class Outcome(NamedTuple):
    """How a mutant fared."""

    how: str  # killed, hung, survived, or not covered
    by: str = ""  # the test that noticed


def make_tree(folder: Path) -> Path:
    """A copy of the repository in `folder`, with `shared` beside it as it stands beside the original."""
    tree = folder / "repo"
    shutil.rmtree(folder, ignore_errors=True)
    tree.mkdir(parents=True)
    for part in _PARTS:
        source = REPO / part
        if source.is_dir():
            shutil.copytree(source, tree / part)  # what is compiled with it: the sources keep their times
        elif source.exists():
            shutil.copy2(source, tree / part)
    shared = REPO.parent / "shared"
    if shared.exists():
        (folder / "shared").symlink_to(shared.resolve())
    return tree


def try_mutant(tree: Path, mutant: Mutant, tests: Sequence[str], seconds: float) -> Outcome:
    """Run the tests on the mutated copy until one fails; the copy is whole again afterwards."""
    if not tests:
        return Outcome("not covered")
    file = tree / mutant.file
    original, times = file.read_bytes(), file.stat()
    file.write_text(mutant.text)
    _forget_compiled(file)
    try:
        return _run(tree, tests, seconds)
    finally:
        file.write_bytes(original)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        _forget_compiled(file)


def _forget_compiled(file: Path) -> None:
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()  # it would be believed: same size, same second


def _run(tree: Path, tests: Sequence[str], seconds: float) -> Outcome:
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "--tb",
        "no",
        "--durations",
        "0",
    ]
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        ["nice", "-n", "10", *words, *tests],
        cwd=tree,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return Outcome("hung")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode == 0:
        return Outcome("survived")
    if process.returncode not in (1, 2) and not said.strip():
        raise RuntimeError(f"pytest ended with {process.returncode}")
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed or "not found" in said:
        return Outcome("survived" if "no tests ran" in said else "killed", said[-300:])
    return Outcome("killed", failed[0].split(" ")[1])
