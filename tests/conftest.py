"""Where tests find real checkpoints: the small ones in `tests/data`, the rest in `../shared` when it is there."""

from __future__ import annotations

import os
import re
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


def fixture_dir(name: str) -> Path:
    """The folder of a real checkpoint, or skip with the reason when only the repo is there."""
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
