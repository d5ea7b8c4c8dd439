"""The checkpoints of `tests/data/fully_shard.tar.xz`, unpacked once a session."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.conftest import DATA


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds `titan`, `app`, `numbered` and `truth.pt` (see `sharded_model`)."""
    folder = tmp_path_factory.mktemp("fully_shard")
    with tarfile.open(DATA / "fully_shard.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder
