"""Where tests find real checkpoints, and what may skip."""

import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests.data.pack import GROUPS, unpacked

pytest.register_assert_rewrite("tests.commands.oracle")

REPO = Path(__file__).resolve().parent.parent
DATA = REPO / "tests" / "data"
LLAMA = "core019_llama_tp2_fully_reshardable"  # not packed, as the examples use it
NATIVE = "core019_llama_tp2_native_fsdp_dtensor"
MOE = "core019_moe_ep2_fully_reshardable"
RUN, FSDP = DATA / LLAMA, unpacked(NATIVE)
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


def all_checkpoints(*groups: str) -> dict[str, Path]:
    """Every real checkpoint by name, of `groups` of `tests.data.pack` or of all, and that which is not packed."""
    names = [name for group in groups or GROUPS for name in GROUPS[group]]
    found = {path.name: path for path in (DATA / LLAMA, *map(unpacked, names))}
    return {name: path for name, path in sorted(found.items()) if _is_run(path)}


def _is_run(path: Path) -> bool:
    root = path / "checkpoint" if (path / "checkpoint").is_dir() else path
    return bool(list(root.glob("iter_*"))) or (root / ".metadata").exists()


def fixture_dir(name: str) -> Path:
    """The folder of a real checkpoint of tests/data, packed or not."""
    return DATA / name if name == LLAMA else unpacked(name)


@pytest.fixture(scope="session")
def cases() -> Path:
    """Small inputs that once went wrong, a folder each."""
    return unpacked("cases")


@pytest.fixture(scope="session")
def user_cases() -> Path:
    """Those that users met."""
    return unpacked("user_cases")


@pytest.fixture(scope="session")
def sharded() -> Path:
    """What `fully_shard` saved: `titan`, `app`, `numbered`, `truth.pt` (`tests.megatron.dcp.sharded_model`)."""
    return unpacked("fully_shard")
