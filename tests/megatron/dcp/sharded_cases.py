"""The checkpoints of `fully_shard` in `tests/data/packed`."""

from pathlib import Path

import pytest

from tests.data.pack import unpacked


@pytest.fixture(scope="session")
def sharded() -> Path:
    """The folder that holds `titan`, `app`, `numbered` and `truth.pt` (see `sharded_model`)."""
    return unpacked("fully_shard")
