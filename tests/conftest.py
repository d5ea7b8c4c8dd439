"""Where tests find real checkpoints: in `tests/data`, whole or packed, and more in `../shared` if it is there."""

from __future__ import annotations

import contextlib
import os
import re
import tarfile
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).resolve().parent.parent
DATA = REPO / "tests" / "data"
SHARED = REPO.parent / "shared"
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.register_profile(
    "thorough", deadline=None, max_examples=3000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _if_it_may_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _if_it_may_skip((yield))


def _if_it_may_skip(report: Report) -> Report:
    """CKPT_TOOLS_MAY_SKIP is a pattern: where it is set, what skips for another reason has failed."""
    pattern = os.environ.get("CKPT_TOOLS_MAY_SKIP")
    if report.skipped and pattern is not None and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if not (pattern and re.search(pattern, reason)):
            report.outcome = "failed"
            report.longrepr = f"it may not skip here. {reason}"
    return report


def unpacked(name: str) -> Path:
    """The folder that a checkpoint of tests/data/checkpoints was unpacked into, once for all runs of tests."""
    archive = DATA / "checkpoints" / f"{name}.tar.xz"
    place = REPO / "build" / "test_checkpoints" / f"{archive.stat().st_size}"
    if not (place / name).is_dir():
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as folder:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            with contextlib.suppress(OSError):  # another process was first
                (Path(folder) / name).rename(place / name)
    return place / name


def all_checkpoints() -> dict[str, Path]:
    """Every real checkpoint that is there, by name."""
    found = {path.name.removesuffix(".tar.xz"): path for path in (DATA / "checkpoints").glob("*.tar.xz")}
    found = {name: unpacked(name) for name in found}
    for parent in (DATA, SHARED / "fixtures", SHARED / "fixtures_cpu", SHARED / "fixtures_te"):
        for path in parent.glob("*/"):
            root = path / "checkpoint" if (path / "checkpoint").is_dir() else path
            if list(root.glob("iter_*")) or (root / ".metadata").exists():
                found.setdefault(path.name, path)
    return dict(sorted(found.items()))


def fixture_dir(name: str) -> Path:
    """The folder of a real checkpoint; a few are in ../shared alone, without which the test skips."""
    if (DATA / "checkpoints" / f"{name}.tar.xz").is_file():
        return unpacked(name)
    for parent in (DATA, SHARED / "fixtures", SHARED / "fixtures_cpu", SHARED / "fixtures_te"):
        if (parent / name).is_dir():
            return parent / name
    pytest.skip(f"{name} is not in tests/data and ../shared is absent")


def vector_dir(name: str) -> Path:
    """A folder of recorded upstream placements, or skip with the reason."""
    root = Path(os.environ.get("CKPT_TOOLS_VECTORS", SHARED / "vectors"))
    if not (root / name).exists():
        pytest.skip(f"{root / name} is absent")
    return root / name
