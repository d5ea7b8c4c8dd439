"""Which tests run which lines of the product: measured once, kept outside the repository, used for every mutant.

The map remembers the sources it was made from. Where a file has changed since, the tests of the same function stand
for those of the line; test files that are new or have changed since count whole if they name the mutated module.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import REPO

_SLOW = (
    "clusters",
    "benchmarks",
    "pictures",
    "peers",
    "fuzz",
    "mutants",
)  # folders that prove nothing about a line
_KILLS = "tests/execute/test_faults.py::test_kill_9_anywhere_leaves_the_old_state_and_a_way_on"
_MANY = 400  # test cases that run a line: more say nothing new
_CONFIG = """[run]
source = ckpt_tools
parallel = true
data_file = {data}
context = ${{PYTEST_CURRENT_TEST-}}
patch = fork, _exit
relative_files = true
disable_warnings = no-data-collected, module-not-imported, module-not-measured, already-imported
"""  # processes that a test starts write under its name, which pytest keeps in the environment


class CoverageMap(NamedTuple):
    """Tests by line, and what they were measured on."""

    seconds: dict[str, float]  # by test, the quick ones first
    lines: dict[str, dict[str, list[int]]]  # file -> line -> tests, by their number in `seconds`
    hashes: dict[str, str]  # of product and test files

    def tests(self, file: str, lines: Iterable[int]) -> list[str]:
        """Tests that run one of the lines, the quick ones first, then what is newer than the map."""
        by_line = self.lines.get(file, {})
        names = list(self.seconds)
        found = {number for line in lines for number in by_line.get(str(line), ())}
        return [*self._newer(file), *(names[number] for number in sorted(found))]

    def whole_module(self, file: str) -> list[str]:
        """Tests that run anything of a module: for its tables, which are read when it is imported."""
        return self.tests(file, map(int, self.lines.get(file, {})))

    def is_current(self, file: str) -> bool:
        """Whether the lines of a file are where they were."""
        return self.hashes.get(file) == _hash(REPO / file)

    def _newer(self, file: str) -> list[str]:
        module = file.removesuffix(".py").replace("/", ".")
        changed = [p for p in _test_files() if self.hashes.get(p) != _hash(REPO / p)]
        return [p for p in changed if module in (REPO / p).read_text()]


def load_map(path: Path) -> CoverageMap:
    """The map at `path`."""
    return CoverageMap(**json.loads(path.read_text()))


def make_map(tree: Path, path: Path) -> None:
    """Run the tests of a copy of the repository under coverage, and keep the result at `path`; this takes minutes."""
    import coverage

    folder = path.with_suffix(".parts")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = folder / "coverage.ini"
    config.write_text(_CONFIG.format(data=folder / ".coverage"))
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.mutants.recorder",
        "tests",
    ]
    words += ["--deselect", _KILLS, *(f"--ignore=tests/{name}" for name in _SLOW)]
    words += ["-W", "ignore::coverage.exceptions.CoverageWarning"]
    environ = {**os.environ, "PYTHONPATH": str(tree), "COVERAGE_PROCESS_START": str(config)}
    subprocess.run(words, cwd=tree, env={**environ, "MUTANTS_SECONDS": str(folder / "seconds")}, check=False)
    data = coverage.CoverageData(str(folder / "all"))
    parts = []
    for part in folder.glob(".coverage*"):
        parts.append(coverage.CoverageData(str(part)))
        parts[-1].read()
        data.update(parts[-1])
    seconds: dict[str, float] = defaultdict(float)
    for name in folder.glob("seconds*"):
        for line in name.read_text().splitlines():
            test, taken = line.rsplit(" ", 1)
            seconds[test] += float(taken)
    path.write_text(json.dumps(_as_map(tree, data, seconds)._asdict()))
    shutil.rmtree(folder)


def _as_map(tree: Path, data: Any, seconds: dict[str, float]) -> CoverageMap:
    ordered = dict(sorted(seconds.items(), key=lambda pair: (pair[1], pair[0])))
    numbers = {test: number for number, test in enumerate(ordered)}
    lines: dict[str, dict[str, list[int]]] = {}
    for file in data.measured_files():
        name = str(Path(file).resolve().relative_to(tree.resolve())) if Path(file).is_absolute() else file
        by_line = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = {context.removesuffix(" (call)").removesuffix(" (setup)") for context in contexts}
            by_line[str(line)] = sorted(numbers[test] for test in tests if test in numbers)[:_MANY]
        lines[name] = {line: tests for line, tests in by_line.items() if tests}
    files = [*_test_files(), *(str(p.relative_to(tree)) for p in (tree / "ckpt_tools").rglob("*.py"))]
    return CoverageMap(ordered, lines, {name: _hash(tree / name) for name in files})


def _test_files() -> list[str]:
    found = (p.relative_to(REPO) for p in (REPO / "tests").rglob("test_*.py"))
    return [str(p) for p in found if p.parts[1] not in _SLOW]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""
