"""A command that is refused leaves nothing: no output, and none of the folders that were to hold it."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from tests.conftest import DATA, fixture_dir

RUN = DATA / "core019_llama_tp2_fully_reshardable"
FSDP = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
Command = tuple[str, ...]
WRITERS: dict[str, Command] = {
    "convert": ("convert", "RUN", "OUT"),
    "convert to dcp": ("convert", "RUN", "OUT", "--to", "dcp"),
    "convert back": ("convert", "FSDP", "OUT", "--to", "torch_dist"),
    "lay out anew": ("convert", "FSDP", "OUT", "--gpus", "3"),
    "export-hf": ("export-hf", "RUN", "OUT"),
    "import-hf": ("import-hf", "HF", "OUT"),
    "copy": ("copy", "RUN", "OUT"),
    "copy all": ("copy", "RUN", "OUT", "--iteration", "all"),
    "strip": ("strip", "RUN", "OUT"),
    "slice": ("slice", "RUN", "OUT", "--layers", "0:1"),
    "average": ("average", "RUN", "RUN", "OUT"),
    "modify-state-dict": ("modify-state-dict", "RUN", "OUT", "--op", "remove rng_state.*"),
}  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Sources, and an output two folders below one that is there."""
    for name, source in (("RUN", RUN), ("FSDP", FSDP)):
        shutil.copytree(source, tmp_path / name)
    assert run(["export-hf", str(RUN), str(tmp_path / "HF"), "-q"]) == 0
    return {name: str(tmp_path / name) for name in ("RUN", "FSDP", "HF")} | {
        "OUT": str(tmp_path / "new/runs/out")
    }


def tree(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("name", WRITERS)
def test_where_the_disk_is_full(name, places, tmp_path, monkeypatch, capsys):
    before = tree(tmp_path)
    status = os.statvfs(tmp_path)
    fields = [field for field in dir(status) if field.startswith("f_")]
    full = namedtuple("Full", fields)(**{f: getattr(status, f) for f in fields} | {"f_bavail": 3})
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: full)
        assert run([places.get(word, word) for word in WRITERS[name]]) == 7
    assert " free, but " in capsys.readouterr().err
    left = [str(path.relative_to(tmp_path)) for path in tree(tmp_path) if path not in before]
    assert left == []


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kept", [False, True])
def test_where_the_source_is_damaged(name, kept, places, tmp_path):
    """A folder that somebody else has put there meanwhile, or before, stays."""
    for file in tmp_path.rglob("__0_0.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    for file in tmp_path.rglob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 1)
    if kept:
        (tmp_path / "new").mkdir()
    before = tree(tmp_path)
    assert run([places.get(word, word) for word in WRITERS[name]]) in (1, 4)
    assert [str(path.relative_to(tmp_path)) for path in tree(tmp_path) if path not in before] == []
    assert (tmp_path / "new").exists() == kept


@pytest.mark.parametrize("words", WRITERS.values())
def test_where_the_source_is_absent(words, places, tmp_path):
    for source in ("RUN", "FSDP", "HF"):
        shutil.rmtree(tmp_path / source)
    assert run([places.get(word, word) for word in words]) == 3
    assert tree(tmp_path) == []
