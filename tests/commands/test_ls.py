"""`ls`, `print-tensor` and the page of `inspect`: what is stored, no more read than is shown, names are text."""

import json
import os
import re
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from ckpt_tools.cli.app import run
from ckpt_tools.commands.look import pages
from ckpt_tools.commands.look.checkpoint import MAX_SHOWN, parse_slice, print_tensor
from ckpt_tools.commands.look.inspect import inspect_checkpoint
from ckpt_tools.commands.look.ls import list_run
from ckpt_tools.commands.look.pages import inspection_html
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.storage.open_files import files_below
from tests.conftest import DATA, fixture_dir
from tests.damage import ITERATION
from tests.pages import parse_page

RUN = "core019_llama_tp2_fully_reshardable"
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


TENSORS = {
    "bf16": torch.linspace(-3, 3, 60, dtype=torch.bfloat16).reshape(3, 4, 5),
    "fp32": torch.tensor([1.5, float("nan"), float("inf"), -2.0, 0.0, -float("inf")]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "int": torch.arange(-6, 6).reshape(3, 4),
    "bool": torch.tensor([True, False, True]),
    "large": torch.arange(5000.0).reshape(50, 100),
    "empty": torch.empty(0, 3),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    dcp.save({**TENSORS, "value": {"a": [1, 2.5]}}, checkpoint_id=folder, no_dist=True)
    return str(folder)


@pytest.mark.parametrize("key", ["bf16", "scalar", "int", "bool", "empty"])
def test_small_tensors_are_shown_whole(source, key):
    shown = print_tensor(source, key)
    assert shown.values == TENSORS[key].tolist()
    assert (shown.dtype, shown.shape) == (str(TENSORS[key].dtype)[6:], tuple(TENSORS[key].shape))


def test_large_tensors_show_a_corner(source):
    shown = print_tensor(source, "large")
    assert shown.box is not None
    assert MAX_SHOWN / 4 < shown.box.volume <= MAX_SHOWN
    rows, columns = shown.box.size
    assert shown.values == TENSORS["large"][:rows, :columns].tolist()


@pytest.mark.parametrize("part", ["0:2, :, 3", "1", ":, -1", "[2,0:2,1:]", "-2:, 1:3", "5:9", "", "1, 2, 0"])
def test_slices_are_numpys(source, part):
    index = tuple(
        slice(*(int(n) if n.strip() else None for n in text.split(":"))) if ":" in text else int(text)
        for text in part.strip("[]").split(",")
        if text.strip()
    )
    assert print_tensor(source, "bf16", part).values == TENSORS["bf16"].float().numpy()[index].tolist()


edges = st.one_of(st.none(), st.integers(-9, 9))


@given(st.integers(0, 7), edges, edges)
def test_ranges_are_pythons(length, low, high):
    text = f"{'' if low is None else low}:{'' if high is None else high}"
    box, _ = parse_slice(text, (length,))
    assert list(range(box.start[0], box.stop[0])) == list(range(length))[low:high]


@pytest.mark.parametrize(("part", "message"), [("9", "outside"), ("0:2:1", "neither"), ("x", "neither"),
                                               ("0,0,0,0", "4 parts"), ("-4", "outside")])  # fmt: skip
def test_slices_that_do_not_fit(source, part, message):
    with pytest.raises(UsageError, match=message):
        print_tensor(source, "bf16", part)


def test_statistics(source):
    found = print_tensor(source, "fp32", stats=True).statistics
    mean, rms = pytest.approx(-0.5 / 3), pytest.approx(np.sqrt(6.25 / 3))
    assert found == {"elements": 6, "nan": 1, "inf": 2, "zero": 1, "min": -2.0, "max": 1.5,
                     "mean": mean, "rms": rms, "norm": 2.5}  # fmt: skip
    assert print_tensor(source, "large", stats=True).statistics["mean"] == 2499.5
    assert print_tensor(source, "large", "1", stats=True).statistics["elements"] == 100
    assert print_tensor(source, "empty", stats=True).statistics["min"] is None
    assert print_tensor(source, "bool", stats=True).statistics["zero"] == 1


def test_objects_are_shown_as_values(source):
    assert print_tensor(source, "value.a").values == [1, 2.5]
    with pytest.raises(UsageError, match="not a tensor"):
        print_tensor(source, "value.a", "0")


def test_an_unknown_key_names_its_neighbours(source):
    with pytest.raises(MappingError, match="Did you mean large"):
        print_tensor(source, "larg")


def test_only_what_is_shown_is_read(source, monkeypatch):
    read = []
    original = LocalFiles.read_into

    def counting(self, name, offset, buffer):
        if name != ".metadata":
            read.append(len(buffer))
        original(self, name, offset, buffer)

    monkeypatch.setattr(LocalFiles, "read_into", counting)
    print_tensor(source, "large", "7, 3:5")
    assert min(read) == 8  # two elements
    assert sum(read) <= 2 * 4096 + 2 * 128 + 8  # and the frame around them


def test_a_tensor_of_many_chunks(source):
    root = str(fixture_dir("core019_llama_tp2_fully_reshardable"))
    key = "decoder.layers.mlp.linear_fc1.weight"
    whole = print_tensor(root, key, "1")
    assert len(whole.chunks) > 1
    values = np.array(whole.values)
    assert values.shape == (128, 32)  # an index drops its axis, as in numpy
    assert print_tensor(root, key, "1, 60:70, 5").values == values[60:70, 5].tolist()


FOLDER = DATA / "core019_llama_tp2_fully_reshardable"


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_data_is_what_is_stored():
    found = inspect_checkpoint(str(FOLDER))
    page = inspection_html(found)
    parse_page(page)
    data = data_of(page)
    assert [t[0] for t in data["tensors"]] == list(found.catalog.tensors)
    assert [o[0] for o in data["objects"]] == [key for key, _ in found.objects()]
    for key, dtype, shape, nbytes, count, chunks in data["tensors"]:
        entry = found.catalog.tensors[str(key)]
        stored = (entry.dtype, entry.shape, entry.nbytes, len(entry.chunks))
        assert (dtype, tuple(shape), nbytes, count) == stored
        held = [(tuple(a), tuple(n), data["files"][i]) for a, n, i in chunks]
        assert held == [(*chunk.box, chunk.item.file) for chunk in entry.chunks]


def test_the_page_of_a_very_large_checkpoint_is_bounded(monkeypatch):
    monkeypatch.setattr(pages, "_MOST_CHUNKS", 10)
    tensors = data_of(inspection_html(inspect_checkpoint(str(FOLDER))))["tensors"]
    kept = [t for t in tensors if t[5] is not None]
    assert kept
    assert sum(int(str(t[4])) for t in kept) <= 10
    assert len(kept) < len(tensors)


def test_names_from_strangers(tmp_path):
    evil = "</script><script>alert(1)</script>"
    save_file({evil: torch.ones(2)}, tmp_path / "model.safetensors")
    page = inspection_html(inspect_checkpoint(str(tmp_path)))
    parse_page(page)
    assert page.count("<script") == 2  # the data, and our own
    assert data_of(page)["tensors"][0][0] == evil
    script = page.rpartition("<script>")[2]
    assert "innerHTML" not in script
    assert "document.write" not in script


def test_the_option(tmp_path, capsys):
    assert run(["inspect", str(FOLDER), "--keys", "decoder.*", "--html", str(tmp_path / "a.html")]) == 0
    assert "torch_dist" in capsys.readouterr().out
    keys = [t[0] for t in data_of((tmp_path / "a.html").read_text())["tensors"]]
    assert keys
    assert all(str(key).startswith("decoder.") for key in keys)
    assert run(["inspect", str(FOLDER), "--html", "-"]) == 0
    parse_page(capsys.readouterr().out)
