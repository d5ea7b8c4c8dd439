"""`ls`: what is whole, and how large."""

import os
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from ckpt_tools.cli.app import run
from ckpt_tools.commands.look.ls import list_run
from ckpt_tools.errors import UnsupportedCheckpointError
from ckpt_tools.formats.storage.open_files import files_below
from tests.conftest import DATA, fixture_dir
from tests.damage import ITERATION

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

RUN = "core019_llama_tp2_fully_reshardable"
MOE = "core019_moe_ep2_fully_reshardable"
FSDP = "core019_llama_tp2_native_fsdp_dtensor"


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A run of three iterations: the second is the first, the third was interrupted; and something beside them."""
    root = shutil.copytree(DATA / RUN, tmp_path / "run")
    for name in ("iter_0000004", "iter_0000006"):
        shutil.copytree(root / ITERATION, root / name)
    (root / "iter_0000006" / ".metadata").unlink()
    (root / "logs").mkdir()
    (root / "logs" / "events").write_bytes(bytes(1234))
    return root


def test_listing(three):
    found = list_run(str(three))
    assert [(r.name, r.state, r.is_latest) for r in found.iterations] == [
        ("iter_0000002", "complete", True),
        ("iter_0000004", "complete", False),
        ("iter_0000006", "incomplete", False),
    ]
    first = found.iterations[0]
    assert (first.kind, first.nbytes) == ("torch_dist", bytes_below(three / ITERATION))
    assert first.topology == {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "etp": 2, "world": 2}
    assert "no .metadata" in found.iterations[2].why
    assert found.others["logs"] == 1234
    (three / "latest_checkpointed_iteration.txt").write_text("9")
    broken = list_run(str(three))
    assert broken.latest is None
    assert "iter_0000009" in broken.note


def test_what_is_there_but_not_read_is_told_from_what_is_not_whole(three):
    legacy = three / "iter_0000008" / "mp_rank_00"
    legacy.mkdir(parents=True)
    (legacy / "model_optim_rng.pt").write_bytes(bytes(100))
    (three / "iter_0000009").mkdir()
    rows = {row.name: row for row in list_run(str(three)).iterations}
    assert [rows[f"iter_000000{n}"].state for n in (6, 8, 9)] == ["incomplete", "not read", "not read"]
    assert "legacy 'torch' checkpoint" in rows["iter_0000008"].why
    assert rows["iter_0000008"].nbytes == 100


def test_a_common_state_that_is_not_read_hides_no_bytes(three):
    """Of an unknown class, or damaged: the tensors lie where `.metadata` says."""

    torch.save({"iteration": 2, "x": Fraction(1, 2)}, three / ITERATION / "common.pt")
    (three / "iter_0000004" / "common.pt").write_bytes(b"no archive")
    rows = list_run(str(three)).iterations
    assert [row.state for row in rows] == ["complete", "complete", "incomplete"]
    assert rows[1].topology == {}


def test_a_conversion_tells_the_topology_that_it_is_for(tmp_path):
    assert run(["convert", str(DATA / RUN), str(tmp_path / "out"), "-q", "--dp-shard", "2", "--tp", "2"]) == 0
    (row,) = list_run(str(tmp_path / "out")).iterations
    assert row.kind == "fsdp_dtensor"
    assert row.topology is not None
    assert row.topology["tp"] == 2


def test_nothing_there(tmp_path):
    (tmp_path / "with" / "notes").mkdir(parents=True)
    with pytest.raises(UnsupportedCheckpointError, match="holds no checkpoint"):
        list_run(tmp_path / "with")
    shutil.rmtree(tmp_path / "with")
    with pytest.raises(UnsupportedCheckpointError, match="does not exist"):
        list_run(str(tmp_path / "absent"))
    with pytest.raises(UnsupportedCheckpointError, match="is empty"):
        list_run(str(tmp_path))


def test_files_below_enters_no_linked_folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(b"123")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "a" / "file").symlink_to(tmp_path / "a" / "b" / "c")
    assert files_below(str(tmp_path)) == {"a/b/c": 3, "a/file": 3}
    assert files_below(f"file://{tmp_path}") == {"a/b/c": 3, "a/file": 3}


def test_a_folder_of_runs_is_listed_a_run_a_line(three, capsys):
    folder = three.parent
    shutil.copytree(fixture_dir(FSDP) / ITERATION, folder / "alone")
    (folder / "notes").mkdir()
    (folder / "todo.txt").touch()
    assert run(["ls", str(folder)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[:4] for row in rows] == [
        ["alone", "0", "-", "fsdp_dtensor"],
        ["run", "3", ITERATION, "torch_dist"],
    ]
    found = list_run(folder)
    assert [row.nbytes for row in found.runs] == [bytes_below(folder / "alone"), bytes_below(three)]
    assert found.iterations == ()


def test_what_is_not_a_run_is_not_walked_through(tmp_path, monkeypatch):
    """`ls /` would go through all of a disk before it said that there is no checkpoint."""
    (tmp_path / "usr" / "lib").mkdir(parents=True)
    entered: list[str] = []
    monkeypatch.setattr(os, "scandir", entered.append)
    with pytest.raises(UnsupportedCheckpointError):
        list_run(str(tmp_path))
    assert not entered


def test_damage_is_named_and_not_judged(three, capsys):
    os.truncate(three / "iter_0000004" / "__1_0.distcp", 1000)
    damaged = list_run(three).iterations[1]
    assert damaged.state == "damaged" and "__1_0.distcp: the file has 1000 bytes" in damaged.why
    assert run(["ls", str(three)]) == 0
    out = capsys.readouterr().out
    assert "iter_0000002 *" in out
    assert "iter_0000006" in out and "incomplete" in out and "save was interrupted" in out
    assert run(["ls", str(three / "iter_0000006")]) == 3, "it alone is not a checkpoint"
