"""A skip that nobody expects fails a run that must be whole (`.ci/run`, `tests/peers/run`)."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import REPO

MODULES = {
    "test_module.py": 'import pytest\npytest.importorskip("no_such_package", reason="no such package")\n',
    "test_fixture.py": """
import pytest
@pytest.fixture
def store():
    pytest.skip("no store")
def test_of_it(store): ...
def test_itself(): pytest.skip("itself")
@pytest.mark.xfail(reason="known", strict=True)
def test_known(): assert False
def test_good(): ...
""",
}


@pytest.mark.parametrize(
    ("allowed", "counts"),
    [
        (None, {"passed": 1, "skipped": 3, "xfailed": 1}),
        ("no such|no store|itself", {"passed": 1, "skipped": 3, "xfailed": 1}),
        ("no such|no store", {"passed": 1, "skipped": 2, "xfailed": 1, "failed": 1}),
        ("no such|itself", {"passed": 1, "skipped": 2, "xfailed": 1, "error": 1}),
        ("", {"error": 1}),  # a module
    ],
)
def test_what_may_not_skip_fails(tmp_path, allowed, counts):
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    environ = {name: value for name, value in os.environ.items() if name != "CKPT_TOOLS_MAY_SKIP"}
    environ |= {"PYTHONPATH": str(REPO)} | ({} if allowed is None else {"CKPT_TOOLS_MAY_SKIP": allowed})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", tmp_path],
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    summary = done.stdout.strip().splitlines()[-1].partition(" in ")[0]
    assert {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", summary)} == counts, done.stdout
    refused = not {"failed", "error"}.isdisjoint(counts)
    assert (refused, refused) == ("it may not skip here" in done.stdout, done.returncode != 0)
