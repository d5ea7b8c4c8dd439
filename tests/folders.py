"""What tests ask of a folder with a checkpoint."""

from pathlib import Path

from ckpt_tools import VerifyOptions, verify_checkpoint
from tests.conftest import fixture_dir


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, by the name it has there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def root_of(name: str) -> Path:
    """The run's root in the folder of a real checkpoint of tests/data."""
    found = fixture_dir(name)
    return found / "checkpoint" if (found / "checkpoint").is_dir() else found


def is_sound(place: Path) -> bool:
    """Whether `verify --content` finds nothing wrong."""
    return verify_checkpoint(str(place), None, VerifyOptions(content=True)).is_valid
