"""The small inputs that once went wrong: `cases` of `tests/data/packed`."""

from pathlib import Path

import pytest

from tests.data.pack import unpacked


@pytest.fixture(scope="session")
def cases() -> Path:
    """The folder that holds them, a folder each."""
    return unpacked("cases")


@pytest.fixture(scope="session")
def user_cases() -> Path:
    """The folder of those that users met, a folder each."""
    return unpacked("user_cases")
