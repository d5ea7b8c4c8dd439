"""Where tests find real checkpoints: the small ones in `tests/data`, the rest in `../shared` when it is there."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).resolve().parent.parent
DATA = REPO / "tests" / "data"
SHARED = REPO.parent / "shared"

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.register_profile(
    "thorough", deadline=None, max_examples=3000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where the released packages were installed on purpose, a peer test that skips has failed."""
    report = yield
    if report.skipped and item.get_closest_marker("peer") and "CKPT_TOOLS_PEERS_REQUIRED" in os.environ:
        report.outcome = "failed"
        report.longrepr = f"a peer test may not skip here: {report.longrepr}"
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
