"""The census of every element type against torch; checksums that are absent; a quick look decides no more."""

import dataclasses
import io
import math
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.diff import DiffRequest, diff_checkpoints
from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.execute.proof import masters
from ckpt_tools.execute.proof.masters import compare_masters
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.torch_archive.item_reader import load_object, whole_file
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.dtypes import ITEMSIZE
from ckpt_tools.model.kernels.casts import Array, float32_to_bfloat16
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.model.views import Source
from ckpt_tools.verify.compare import differences
from ckpt_tools.verify.compare.arrays import Tolerance
from ckpt_tools.verify.compare.differences import DiffOptions
from ckpt_tools.verify.content.values import Census, parts_of
from ckpt_tools.verify.report import VerifyOptions
from tests.conftest import DATA
from tests.damage import (
    ITERATION,
    copy_of,
    errors_of,
    findings_of,
    flip_bit,
    infos_of,
    metadata_of,
    only,
    payload_of,
)
from tests.synthetic import DcpFolder

NATIVE, LLAMA = "core019_llama_tp2_native_fsdp_dtensor", "core019_llama_tp2_fully_reshardable"
FLOATING = [name for name in ITEMSIZE if name.startswith(("float", "bfloat", "complex"))]


@pytest.mark.parametrize("dtype", [name for name in FLOATING if ITEMSIZE[name] > 1])
@given(data=st.data())
def test_census_counts_what_torch_calls_nan_and_infinite(dtype, data):
    width = ITEMSIZE[dtype]
    special = st.sampled_from([0x7F, 0x80, 0xFF, 0x00, 0x7C, 0xFC, 0xF0])  # of exponents that are all ones
    raw = bytes(data.draw(st.lists(special | st.integers(0, 255), min_size=width, max_size=8 * width)))
    raw = raw[: len(raw) // width * width]
    tensor = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    census = Census()
    census.add(np.frombuffer(raw, np.uint8), dtype)
    found = (census.elements, census.nans, census.infinities)
    assert found == (parts.numel(), int(parts.isnan().sum()), int(parts.isinf().sum()))


def test_every_eight_bit_float_is_counted():
    for dtype in (name for name in FLOATING if ITEMSIZE[name] == 1):
        every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float32)
        census = Census()
        census.add(np.arange(256, dtype=np.uint8), dtype)
        assert (census.nans, census.infinities) == (int(every.isnan().sum()), int(every.isinf().sum())), dtype


def test_a_writer_that_kept_no_checksums(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"w": torch.ones(1000), "v": 3}, checkpoint_id=tmp_path, no_dist=True)
    finally:
        torch.serialization.set_crc32_options(before)
    found = findings_of(tmp_path, content=True)
    only(found, "checksums", "", "without a checksum")
    assert found[0][0] == "warning"


def test_an_item_with_a_transposed_tensor_and_values_that_are_none(tmp_path):
    tensor = torch.ones(300, 500)
    tensor[7, 11] = float("inf")
    dcp.save({"w": tensor.t()}, checkpoint_id=tmp_path, no_dist=True)
    only(errors_of(tmp_path, content=True), "values", "w", "0 NaN and 1 infinite of 150000")


@pytest.mark.parametrize(("kind", "says"), [
    ("exp_avg", ""), ("exp_avg_sq", "-1 is in it"), ("max_exp_avg_sq", "-1 is in it"),
])  # fmt: skip
def test_squares_below_zero_of_a_plain_optimizer(kind, says, tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias][kind][1] = -1
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = [(where, message[:11]) for _, where, message in errors_of(tmp_path, content=True)]
    assert found == ([(f"optimizer.state.bias.{kind}", says)] if says else [])


def test_a_compressed_record(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(2, protocol=2))
    _replace_object(root, "iteration", stream.getvalue())
    found = findings_of(root)
    assert {f[1] for f in found} == {"common state", "frames"}
    assert all("is compressed, which torch.save never does" in f[3] for f in found)


class _Hostile:
    def __reduce__(self):
        return eval, ("__import__('pathlib').Path('hostile-was-here').touch()",)


def test_an_object_that_would_run_code_is_named_and_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = copy_of(NATIVE, tmp_path)
    stream = io.BytesIO()
    torch.save(_Hostile(), stream)
    _replace_object(root, "opt_param_scheduler.max_lr", stream.getvalue())
    report = verify_checkpoint(str(root), None, VerifyOptions(content=True))
    (finding,) = [f for f in report.findings if f.severity == "error"]
    assert (finding.check, finding.where) == ("frames", "opt_param_scheduler.max_lr")
    assert "eval" in finding.message
    assert report.is_hostile
    assert run(["verify", str(root)]) == 4
    assert "opt_param_scheduler.max_lr" in capsys.readouterr().out
    assert not (tmp_path / "hostile-was-here").exists()


HOSTILE = ("global_Popen", "global_getattr", "globals_without_end", "memo_bomb")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_hostile_metadata_ends_with_4(command, name, tmp_path, capsys):
    shutil.copy(DATA / "hostile" / f"{name}.metadata", tmp_path / ".metadata")
    assert run([command, str(tmp_path)]) == 4
    said = "".join(capsys.readouterr())
    assert any(part in said for part in ("no known checkpoint holds", "more than 500 globals", "hostile"))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/../../b"])
def test_metadata_that_names_files_elsewhere_is_hostile(name, tmp_path, capsys):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        next(iter(metadata.storage_data.values())).relative_path = name
    for command in ("inspect", "verify"):
        assert run([command, str(root)]) == 4
        assert "leads out of the checkpoint" in "".join(capsys.readouterr())


def test_damaged_metadata_is_not_valid(tmp_path, capsys):
    shutil.copy(DATA / "hostile" / "giant_text.metadata", tmp_path / ".metadata")
    assert run(["inspect", str(tmp_path)]) == 4
    assert run(["verify", str(tmp_path)]) == 1
    assert "truncated or damaged" in capsys.readouterr().out


OF_016 = "core016_llama_tp2_fully_reshardable"


def test_a_flipped_bit_of_the_common_state_is_found(tmp_path):
    """Every record of `common.pt`: one bit of `data.pkl` makes another learning rate of one."""
    root = copy_of(OF_016, tmp_path)
    path = root / ITERATION / "common.pt"
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    assert len(records) >= 5
    for name, content in records.items():
        at = data.index(content, data.index(name.encode()))
        flip_bit(path, at + len(content) // 2, 1)
        only(
            [f for f in errors_of(root, content=True) if f[0] == "checksums"],
            "checksums",
            "common.pt",
            repr(name),
        )
        path.write_bytes(data)


def test_one_bit_that_makes_another_learning_rate(tmp_path, capsys):
    root = copy_of(OF_016, tmp_path)
    path = root / ITERATION / "common.pt"
    files = LocalFiles(str(path.parent))
    before = load_object(files, whole_file(files, path.name))["opt_param_scheduler"]["max_lr"]
    files.close()
    at = path.read_bytes().index(struct.pack(">d", before), path.read_bytes().index(b"max_lr"))
    flip_bit(path, at + 1, 4)
    assert run(["verify", str(root)]) == 1  # what is read is proven, whatever the command
    assert "record 'common/data.pkl'" in capsys.readouterr().out
    assert run(["verify", str(root), "--content"]) == 1
    assert "error: checksums: common.pt: record 'common/data.pkl'" in capsys.readouterr().out


def test_flags_that_torchs_reader_refuses(tmp_path):
    """One bit in the zip directory: torch takes the record for encrypted."""
    root = copy_of(LLAMA, tmp_path)
    path = root / ITERATION / "__0_0.distcp"
    at = path.read_bytes().index(b"PK\x01\x02") + 8
    for bit in (0, 5, 6, 13):
        flip_bit(path, at + bit // 8, bit % 8)
        assert any(f[0] == "frames" and "encrypted" in f[2] for f in errors_of(root)), bit
        flip_bit(path, at + bit // 8, bit % 8)
    assert not errors_of(root)
    flip_bit(path, at + 26)  # the number of the disk on which the record begins
    assert any(f[0] == "frames" and "on another disk" in f[2] for f in errors_of(root))


def _replace_object(root, key, archive):
    with metadata_of(root) as metadata:
        _, info = infos_of(metadata, key)[None]
        path = root / ITERATION / info.relative_path
        info.offset, info.length = path.stat().st_size, len(archive)
        with open(path, "ab") as file:
            file.write(archive)


def _report_of(root, **options):
    return verify_checkpoint(str(root), None, VerifyOptions(content=True, **options))


@pytest.mark.parametrize("name", [LLAMA, NATIVE])
def test_the_report_does_not_depend_on_parts_nor_on_whether_a_frame_is_known(name, tmp_path, monkeypatch):
    """Sound; with bits flipped at the beginning, inside and at the end of payloads, and numbers that are none."""
    root = copy_of(name, tmp_path)
    catalog = read_catalog(LocalFiles(str(root / ITERATION)))
    long = [key for key, entry in catalog.tensors.items() if entry.chunks[0].item.length > 4096][:3]
    sound = _report_of(root)
    for number, key in enumerate(long):
        path, start, data = payload_of(root, key, catalog.tensors[key].chunks[0].box.start)
        flip_bit(path, start + (0, len(data) // 2, len(data) - 1)[number])
    path, start, data = payload_of(root, long[0], catalog.tensors[long[0]].chunks[0].box.start)
    with open(path, "r+b") as file:
        file.seek(start + len(data) // 2)
        file.write(b"\xff" * 8)
    damaged = _report_of(root)
    errors = [(f.check, f.where.split(" ")[0]) for f in damaged.findings if f.severity == "error"]
    assert {where for check, where in errors if check == "checksums"} == set(long)
    assert ("values", long[0]) in errors
    monkeypatch.setattr("ckpt_tools.verify.content.content._PART_BYTES", 512)
    assert _report_of(root) == damaged
    for module in ("content.content", "checkpoint.structure"):
        monkeypatch.setattr(f"ckpt_tools.verify.{module}.usual_item", lambda *_: None)
    assert _report_of(root) == damaged
    shutil.rmtree(root)
    assert _report_of(copy_of(name, tmp_path)) == sound


def test_parts_of_a_file_that_is_cut_are_one_problem(tmp_path, monkeypatch):
    root = copy_of(LLAMA, tmp_path)
    monkeypatch.setattr("ckpt_tools.verify.content.content._PART_BYTES", 512)
    catalog = read_catalog(LocalFiles(str(root / ITERATION)))
    key, entry = max(catalog.tensors.items(), key=lambda pair: pair[1].chunks[0].item.length)
    item = entry.chunks[0].item
    with open(root / ITERATION / item.file, "r+b") as file:
        file.truncate(item.offset + item.length - 64)
    found = [f.where for f in _report_of(root).findings if f.check == "checksums"]
    assert found.count(f"{key} {entry.chunks[0].box}") == 1


def test_parts_of_tensors_without_a_frame(tmp_path, monkeypatch):
    """safetensors: no checksums, but numbers that are none are counted wherever a part ends."""
    values = np.ones((3, 1000), np.float32)
    values[0, 0] = values[1, 511] = np.nan
    values[2, 999] = np.inf
    save_file({"w": values, "none": np.ones((0, 3), np.float32)}, tmp_path / "model.safetensors")
    whole = _report_of(tmp_path)
    assert "2 NaN and 1 infinite of 3000" in "".join(f.message for f in whole.findings)
    monkeypatch.setattr("ckpt_tools.verify.content.content._PART_BYTES", 512)
    assert _report_of(tmp_path) == whole


@pytest.mark.parametrize("size", [(1 << 40, 1 << 41), (1 << 31, 1 << 31), (1 << 50,)])
def test_a_tensor_that_no_disk_could_hold_is_a_finding(size, tmp_path):
    """Whether the item is said to be as small as it is, or as large as the tensor."""
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        key = "decoder.final_layernorm.weight"
        stored = metadata.state_dict_metadata[key]
        stored.size = stored.chunks[0].sizes = torch.Size(size)
        stored.chunks[0].offsets = torch.Size((0,) * len(size))
        ((index, info),) = infos_of(metadata, key).values()
        metadata.storage_data[dataclasses.replace(index, offset=torch.Size((0,) * len(size)))] = info
        if len(size) > 1:
            del metadata.storage_data[index]
    assert {f.check for f in _report_of(root).findings if f.where.startswith(key)} >= {"frames"}
    with metadata_of(root) as metadata:
        ((_, info),) = infos_of(metadata, key).values()
        info.length = 1 << 61
    assert {f.check for f in _report_of(root).findings if key in f.message} >= {"files"}


def test_two_chunks_that_share_their_bytes_are_each_proven(tmp_path):
    """A writer that stores equal bytes once: both are what was written."""
    out = DcpFolder(tmp_path / "c")
    values = np.arange(8, dtype=np.float32)
    out.tensor("w", "float32", np.concatenate([values, values]), [Box((0,), (8,)), Box((8,), (8,))])
    out.finish()
    metadata = pickle.loads((tmp_path / "c/.metadata").read_bytes())
    first, second = metadata.storage_data.values()
    second.relative_path, second.offset = first.relative_path, first.offset
    (tmp_path / "c/.metadata").write_bytes(pickle.dumps(metadata))
    report = _report_of(tmp_path / "c")
    assert not [f for f in report.findings if f.severity == "error"], report.findings
    assert next(c.looked_at for c in report.checks if c.name == "checksums") == 14


def test_tensors_that_no_disk_could_hold_have_few_parts():
    for shape in ((1 << 40, 1 << 41), (1 << 62,), (3, 1 << 50, 5), (1 << 50, 3)):
        parts = parts_of([InlineTensor("w", "float32", shape, b"")])
        assert sum(part.box.volume for part in parts) == math.prod(shape)
        assert len(parts) <= 1 << 16


SHAPE = (24, 40)
CUTS = {
    "whole": [full_box(SHAPE)],
    "rows": [Box((0, 0), (7, 40)), Box((7, 0), (17, 40))],
    "columns": [Box((0, 0), (24, 13)), Box((0, 13), (24, 27))],
}
ODD = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38], np.float32)


def _values(seed: int) -> Array:
    random = np.random.default_rng(seed)
    values = random.standard_normal(SHAPE, np.float32)
    values.reshape(-1)[random.integers(0, values.size, 12)] = random.choice(ODD, 12)
    return values


def _altered(values: Array, seed: int) -> Array:
    """Some numbers are others, and some not-numbers and zeros are others of their kind."""
    random, other = np.random.default_rng(seed), values.copy()
    at = random.integers(0, values.size, 3)
    other.reshape(-1)[at] = random.choice([*ODD, 1.5], 3)
    return other


def _write(folder: Path, cut: str, values: Array, weights: Array | None = None) -> Path:
    out = DcpFolder(folder)
    out.tensor("master", "float32", values, CUTS[cut])
    if weights is not None:
        out.tensor("weight", "bfloat16", weights, CUTS[cut])
    out.finish()
    return folder


def _no_look(*_: object) -> list[object]:
    return []


@pytest.mark.parametrize(
    "cuts", [("whole", "whole"), ("rows", "whole"), ("columns", "columns"), ("columns", "rows")]
)
@pytest.mark.parametrize(
    "tolerance", [Tolerance(), Tolerance(nan="different"), Tolerance(rtol=1e-2, nan="equal")]
)
@pytest.mark.parametrize("seed", range(2))
def test_diff_says_the_same_without_it(tmp_path, monkeypatch, cuts, tolerance, seed):
    values = _values(seed)
    a = _write(tmp_path / "a", cuts[0], values)
    b = _write(tmp_path / "b", cuts[1], _altered(values, seed) if seed else values)
    options = DiffOptions(tolerance, workers=1)
    quick = diff_checkpoints(a, b, options, DiffRequest(by="keys"))
    monkeypatch.setattr(differences, "in_step", _no_look)
    assert repr(diff_checkpoints(a, b, options, DiffRequest(by="keys"))) == repr(quick)
    assert quick.is_equal == (seed == 0 and tolerance.nan != "different")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("seed", range(4))
def test_masters_are_judged_the_same_without_it(tmp_path, monkeypatch, cut, seed):
    values = _values(seed)
    weights = float32_to_bfloat16(_altered(values, seed) if seed % 2 else values)
    folder = _write(tmp_path / "a", cut, values, weights)
    files = LocalFiles(str(folder))
    rounds = {"must_round_to": (Source("weight"),), "must_round_dtype": "bfloat16"}
    target = TargetTensor("master", "float32", SHAPE, (Source("master"),), **rounds)  # type: ignore[arg-type]
    quick = compare_masters(files, read_catalog(files), [target], "all")
    monkeypatch.setattr(masters, "in_step", _no_look)
    assert compare_masters(files, read_catalog(files), [target], "all") == quick
    assert bool(quick[1]) == bool(seed % 2)
