"""The small inputs of `tests/data/value_cases.tar.xz` and `more_cases.tar.xz`, unpacked once a session."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.conftest import DATA


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds them, a folder each."""
    folder = tmp_path_factory.mktemp("cases")
    for name in ("value_cases.tar.xz", "more_cases.tar.xz"):
        with tarfile.open(DATA / name) as archive:
            archive.extractall(folder, filter="data")
    return folder
