"""A pytest plugin for `coverage_map`: names the running test to coverage, and notes how long each took."""

from __future__ import annotations

import os
from collections.abc import Generator

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        if current is not None:
            current.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the process that collects the reports of all
        with open(os.environ["MUTANTS_SECONDS"], "a") as file:
            file.write(f"{report.nodeid} {report.duration}\n")
