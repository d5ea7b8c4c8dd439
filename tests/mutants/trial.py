"""One mutant at a time in a copy of the repository: do the tests that run its line notice?"""

from __future__ import annotations

import json
import os
import shutil
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
    """A copy of the repository in `folder`."""
    tree = folder / "repo"
    shutil.rmtree(folder, ignore_errors=True)
    tree.mkdir(parents=True)
    for part in _PARTS:
        source = REPO / part
        if source.is_dir():
            shutil.copytree(source, tree / part)  # what is compiled with it: the sources keep their times
        elif source.exists():
            shutil.copy2(source, tree / part)
    return tree


class Trials:
    """Tries mutants in one copy, one at a time."""

    def __init__(self, folder: Path, imported: Sequence[str] = ()) -> None:
        """`imported` are modules that every run of tests finds in memory."""
        self.tree = make_tree(folder)
        self._said = folder / "said"
        environ = {**os.environ, "PYTHONPATH": str(self.tree), "PYTHONDONTWRITEBYTECODE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py")), *imported],
            cwd=self.tree,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.communicate()
        shutil.rmtree(self.tree.parent)

    def try_mutant(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> Outcome:
        """Run the tests on the mutated copy until one fails; the copy is whole again afterwards."""
        file = self.tree / mutant.file
        original, times = file.read_bytes(), file.stat()
        file.write_text(mutant.text)
        _forget_compiled(file)
        try:
            return self._run(tests, seconds)
        finally:
            file.write_bytes(original)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            _forget_compiled(file)

    def failing(self, tests: Sequence[str], seconds: float) -> set[str]:
        """Which of the tests fail on the copy as it is: what they say of a mutant counts for nothing."""
        self._ask(["--maxfail", "100000", *tests], seconds)
        return set(self._failed())

    def _run(self, tests: Sequence[str], seconds: float) -> Outcome:
        status = self._ask(["-x", *tests], seconds)
        if status in ("hung", "0"):
            return Outcome("hung" if status == "hung" else "survived")
        failed = self._failed()
        if not failed:
            raise RuntimeError(f"pytest ended with {status}: {self._said.read_text()[-500:]}")
        return Outcome("killed", failed[0])

    def _ask(self, words: Sequence[str], seconds: float) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        usual = ["-q", "-n", "0", "-p", "no:cacheprovider", "--tb", "no", "--durations", "0", "-rfE"]
        usual += [
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]  # the server has imported a plugin already
        self._server.stdin.write(json.dumps([seconds, str(self._said), *usual, *words]) + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline().strip()

    def _failed(self) -> list[str]:
        lines = self._said.read_text(errors="replace").splitlines()
        return [
            line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))
        ]


def _forget_compiled(file: Path) -> None:
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()  # it would be believed: same size, same second
