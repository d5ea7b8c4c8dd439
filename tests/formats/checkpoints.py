"""The recorded checkpoints, and stock ways to read them, for the tests of this folder."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from tests.conftest import all_checkpoints


def dcp_folders() -> list[Any]:
    """Every folder with a `.metadata` of a real checkpoint as a named parameter."""
    found = {file.parent for run in all_checkpoints().values() for file in run.rglob(".metadata")}
    names = {"/".join(folder.parts[-2:]): folder for folder in sorted(found, reverse=True)}
    return [pytest.param(folder, id=name) for name, folder in sorted(names.items())]


class _Skipped:
    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _StockUnpickler(pickle.Unpickler):
    """torch's own classes; only Megatron's, which need not be installed, are replaced."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "MCoreMetadata":
            return Metadata
        if module.startswith("megatron"):
            return _Skipped
        return super().find_class(module, name)


def stock_metadata(folder: Path) -> Metadata:
    """`.metadata` by the stock unpickler."""
    with (folder / ".metadata").open("rb") as file:
        found = _StockUnpickler(file).load()
    assert isinstance(found, Metadata)
    return found
