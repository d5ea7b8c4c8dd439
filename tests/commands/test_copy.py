"""`copy`: the same bytes everywhere, proven on the way; whole or not at all; goes on where it was stopped."""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from ckpt_tools import CopyOptions, copy_checkpoint
from ckpt_tools.cli.app import run
from ckpt_tools.commands.edit.copy import CopyReport
from ckpt_tools.commands.job import conversion
from ckpt_tools.errors import CorruptCheckpointError, StorageError, UsageError, VerificationError
from ckpt_tools.execute.output.remote_output import RemoteOutput
from ckpt_tools.execute.run import WriteOptions, write_checkpoint
from ckpt_tools.formats.locate.detect import BRIDGE_TRACKER
from ckpt_tools.model.transfers import Transfer
from ckpt_tools.plan import build
from ckpt_tools.plan.build import RawFile, Run, build_copy_plan
from tests.conftest import DATA, fixture_dir
from tests.damage import ITERATION, copy_of, flip_bit, payload_of
from tests.folders import content

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

RUN = "core019_llama_tp2_fully_reshardable"
MOE = "core019_moe_ep2_fully_reshardable"
FSDP = "core019_llama_tp2_native_fsdp_dtensor"
KEY = "decoder.final_layernorm.weight"


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Archives with payloads that are copied as runs, others that are read whole, an object, a link, a big file."""
    folder = tmp_path / "large"
    tensors = {
        "big": torch.randn(300, 200),
        "t": torch.randn(200, 300).t(),
        "small": torch.ones(3),
        "o": ["x"] * 9,
    }
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / "notes.txt").write_bytes(bytes(range(256)) * 8000)
    torch.save({"a": torch.randn(500_000)}, folder / "extra.pt")
    (folder / "empty").touch()
    return folder


@pytest.mark.parametrize("name", [RUN, MOE, FSDP, "core016_llama_tp2_dp_reshardable"])
@pytest.mark.parametrize("whole_root", [True, False])
def test_a_copy_has_the_bytes_of_its_source(name, whole_root, tmp_path):
    source = fixture_dir(name)
    place = source if whole_root else source / ITERATION
    done = copy_checkpoint(place, tmp_path / "out", CopyOptions(read_back=True))
    out = tmp_path / "out" / ITERATION
    assert content(out) == content(source / ITERATION)
    (one,) = done.copied
    assert one.nbytes == sum(map(len, content(out).values()))
    assert one.files == len(content(out))
    assert one.proven > 30
    assert not one.without_checksum
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_large_and_small_and_strange_files(large, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PART_BYTES", 30_000)
    (one,) = copy_checkpoint(large, tmp_path / "out").copied
    assert content(tmp_path / "out") == content(large)
    assert one.proven == 5  # three tensors, the object, the payload of extra.pt


def test_there_and_back_through_a_store(store, large, tmp_path):
    copy_checkpoint(DATA / RUN, "memory://bucket/run", CopyOptions(read_back=True))
    assert store.cat("/bucket/run/latest_checkpointed_iteration.txt") == b"2"
    copy_checkpoint("memory://bucket/run", "memory://bucket/again")
    copy_checkpoint("memory://bucket/again", tmp_path / "back")
    assert content(tmp_path / "back" / ITERATION) == content(DATA / RUN / ITERATION)
    copy_checkpoint(large, "memory://bucket/large")
    copy_checkpoint("memory://bucket/large", tmp_path / "large2")
    assert content(tmp_path / "large2") == content(large)


def test_metadata_comes_last_in_a_store(store, monkeypatch):
    """Nobody who looks at the folder meanwhile takes it for a checkpoint."""
    put: list[str] = []
    original = RemoteOutput.publish

    def publish(output: RemoteOutput, *args: Any) -> None:
        store_put = output._store.put

        def noted(name: str, data: bytes) -> None:
            put.append(name)
            store_put(name, data)

        monkeypatch.setattr(output._store, "put", noted)
        original(output, *args)

    monkeypatch.setattr(RemoteOutput, "publish", publish)
    copy_checkpoint(DATA / RUN / ITERATION, "memory://bucket/one")
    assert put[-1] == ".metadata"
    assert len(put) > 1


def test_a_hugging_face_model_with_all_that_lies_beside_it(tmp_path):
    model = tmp_path / "hf"
    model.mkdir()
    save_file({"a.weight": torch.randn(700, 500), "b": torch.zeros(0)}, model / "model.safetensors")
    save_file({"other": torch.ones(5)}, model / "consolidated.safetensors")
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_bytes(b"x" * 3_000_000)
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").write_bytes(b"1")
    (one,) = copy_checkpoint(model, tmp_path / "out").copied
    assert one.left_out == ("onnx/model.onnx",)
    assert content(tmp_path / "out") == {n: b for n, b in content(model).items() if "/" not in n}
    assert (one.proven, one.without_checksum) == (0, 3)


def test_what_is_not_a_file_is_named(tmp_path, capsys):
    model = Path(shutil.copytree(fixture_dir(RUN) / "iter_0000002", tmp_path / "run"))
    os.mkfifo(model / "fifo")
    os.mknod(model / "socket", 0o600 | stat.S_IFSOCK)
    (model / "nowhere").symlink_to("absent")
    (model / "linked").symlink_to(tmp_path)
    (model / "inner").mkdir()
    os.mkfifo(model / "inner" / "fifo")
    assert run(["copy", str(model), str(tmp_path / "out"), "--json"]) == 0
    left = json.loads(capsys.readouterr().out)["copied"][0]["left_out"]
    assert left == ["fifo", "inner/fifo", "linked", "nowhere", "socket"]


def test_entries_in_folders_inside_are_refused(user_cases, tmp_path, capsys):
    assert run(["copy", str(user_cases / "metadata_offset_2e63" / "dir"), str(tmp_path / "out")]) == 3
    assert "sub/x.distcp" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


DAMAGE = {  # the file, and what is changed in it; None: the byte in its middle
    "payload": ("*.distcp", None),
    "small archive": ("*.distcp", torch.ones(3).numpy().tobytes()),
    "description": ("*.distcp", b"torch._utils"),
    "file beside": ("extra.pt", None),
}


def damaged(large: Path, part: str) -> None:
    name, found = DAMAGE[part]
    file = next(large.glob(name))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 if found is None else raw.index(found)] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("part", DAMAGE)
@pytest.mark.parametrize("place", ["out", "memory://bucket/out"])
def test_damage_is_not_copied_unseen(part, place, large, tmp_path, store):
    damaged(large, part)
    output = place if "://" in place else str(tmp_path / place)
    with pytest.raises(CorruptCheckpointError, match=r"CRC-32|checksum"):
        copy_checkpoint(large, output)
    assert not (tmp_path / "out").exists()
    assert not store.exists("/bucket/out/.metadata")
    options = CopyOptions(write=WriteOptions(check_source="none"), overwrite=True)
    copy_checkpoint(large, tmp_path / "taken", options)
    assert content(tmp_path / "taken") == content(large)


class _Stop:
    """A disk that is full after some bytes."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, done: int, _total: int) -> None:
        if done >= self.after:
            raise StorageError("the disk is full")


def test_what_was_stopped_goes_on(large, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PART_BYTES", 30_000)
    with pytest.raises(StorageError, match="full"):
        copy_checkpoint(large, tmp_path / "out", progress=_Stop(1))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="--resume"):
        copy_checkpoint(large, tmp_path / "out")
    copy_checkpoint(large, tmp_path / "out", CopyOptions(resume=True))
    assert content(tmp_path / "out") == content(large)
    assert not list(tmp_path.glob(".out*"))
    copy_checkpoint(large, tmp_path / "out", CopyOptions(resume=True))  # finished: compared
    with pytest.raises(UsageError, match="not empty"):
        copy_checkpoint(large, tmp_path / "out")
    (large / "notes.txt").write_text("new")
    copy_checkpoint(large, tmp_path / "out", CopyOptions(overwrite=True))
    assert content(tmp_path / "out") == content(large)


def three(tmp_path: Path) -> Path:
    root = copy_of(RUN, tmp_path)
    for name in ("iter_0000004", "iter_0000006"):
        shutil.copytree(root / ITERATION, root / name)
    (root / "iter_0000004" / ".metadata").unlink()
    (root / "latest_checkpointed_iteration.txt").write_text("6")
    return root


@pytest.mark.filterwarnings("ignore:.*the folder says iteration")
@pytest.mark.parametrize(
    ("inner", "iteration", "copied"),
    [
        ("", None, True),
        ("", 6, True),
        ("", 2, False),
        ("iter_0000006", None, False),
        ("iter_0000002", None, False),
    ],
)
def test_bridges_tracker_goes_with_the_iteration_that_it_names(inner, iteration, copied, tmp_path):
    root = three(tmp_path)
    (root / "latest_checkpointed_iteration.txt").unlink()
    torch.save({"step": torch.tensor(6, dtype=torch.int32)}, root / BRIDGE_TRACKER)
    copy_checkpoint(root / inner, tmp_path / "out", CopyOptions(iteration=iteration))
    made = [path for path in tmp_path.rglob(BRIDGE_TRACKER) if path.parent != root]
    assert made == [tmp_path / "out" / BRIDGE_TRACKER] * copied
    assert all(path.read_bytes() == (root / BRIDGE_TRACKER).read_bytes() for path in made)


@pytest.mark.filterwarnings("ignore:.*the folder says iteration")
def test_all_iterations_past_those_that_are_there_or_not_whole(tmp_path):
    root, out = three(tmp_path), tmp_path / "out"
    every = CopyOptions(every_iteration=True)
    first = copy_checkpoint(root, out, every)
    assert [one.output[-12:] for one in first.copied] == ["iter_0000002", "iter_0000006"]
    assert [(number, error.exit_code) for number, error in first.failed] == [(4, 3)]
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "6"
    again = copy_checkpoint(root, out, every)
    assert (again.copied, again.already_there) == ((), (2, 6))
    shutil.copy(root / ITERATION / ".metadata", root / "iter_0000004")
    later = copy_checkpoint(root, out, every)
    assert [one.output[-12:] for one in later.copied] == ["iter_0000004"]
    assert (
        out / "latest_checkpointed_iteration.txt"
    ).read_text() == "6"  # not that of the one that came late
    with pytest.raises(UsageError, match="one checkpoint, not a run's root"):
        copy_checkpoint(root / ITERATION, tmp_path / "x", every)


def test_reading_back_finds_what_storage_changed(tmp_path, monkeypatch):
    real = write_checkpoint

    def and_rot(*args: object, **named: object) -> object:
        written = real(*args, **named)  # type: ignore[arg-type]
        file, at, _ = payload_of(tmp_path / "out", KEY, (0,))
        flip_bit(file, at)
        return written

    monkeypatch.setattr(conversion, "write_checkpoint", and_rot)
    with pytest.raises(VerificationError, match="read back, it differs from"):
        copy_checkpoint(DATA / RUN, tmp_path / "out", CopyOptions(read_back=True))


def test_places_that_overlap(tmp_path):
    with pytest.raises(UsageError, match="overlap"):
        copy_checkpoint(DATA / RUN, DATA / RUN / "inside")
    with pytest.raises(UsageError, match="on web servers"):
        copy_checkpoint(DATA / RUN, "https://example.invalid/run")


def test_a_plan_cuts_files_where_checksums_begin_and_end(monkeypatch):
    monkeypatch.setattr(build, "PART_BYTES", 40)
    plan = build_copy_plan(
        {"f": RawFile(200, (Run(20, 100, "k", 7), Run(130, 0, "e", 3)), b"h" * 10), "g": RawFile(5)}
    )
    rows = []
    for i in plan.items:
        (first, *_) = i.transfers
        assert isinstance(first, Transfer)
        rows.append((i.file, i.offset, i.length, first.item.crc32, first.piece.offset))
    assert rows == [
        ("f", 10, 10, None, 0), ("f", 20, 40, 7, 0), ("f", 60, 40, 7, 40), ("f", 100, 20, 7, 80),
        ("f", 120, 10, None, 0), ("f", 130, 40, None, 0), ("f", 170, 30, None, 40), ("g", 0, 5, None, 0),
    ]  # fmt: skip
    assert [(b.file, b.offset, b.data) for b in plan.blobs] == [("f", 0, b"h" * 10)]
    assert plan.file_bytes == {"f": 200, "g": 5}


@pytest.mark.filterwarnings("ignore:.*the folder says iteration")
def test_the_command(tmp_path, capsys):
    root = three(tmp_path)
    assert run(["copy", str(root), str(tmp_path / "out"), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("would copy ") and not (tmp_path / "out").exists()
    assert run(["copy", str(root), str(tmp_path / "out")]) == 0
    assert "payloads have the checksum that their writer stored" in capsys.readouterr().out
    assert run(["copy", str(root), str(tmp_path / "out"), "--resume"]) == 0
    assert capsys.readouterr().out.startswith("compared, it was complete already")
    assert run(["copy", str(root), str(tmp_path / "all"), "-q", "--iteration", "all"]) == 3
    assert "error: iteration 4 was not copied: " in capsys.readouterr().err
    words = ["copy", str(root), str(tmp_path / "one"), "--iteration", "2", "--check-source", "none"]
    assert run(words) == 0
    told = capsys.readouterr().out
    assert "no payload was compared with the checksum" in told and "have the checksum" not in told
    assert run(["copy", str(root), str(tmp_path / "x"), "--iteration", "some"]) == 2
    assert isinstance(copy_checkpoint(root, tmp_path / "y"), CopyReport)
