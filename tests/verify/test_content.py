"""The census of every element type against torch; checksums that are absent, and storages that hold more."""

from __future__ import annotations

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

from ckpt_tools.convert.verify import VerifyOptions, verify_checkpoint
from ckpt_tools.dtypes import ITEMSIZE
from ckpt_tools.verify.values import Census
from tests.damage import ITERATION, copy_of, infos_of, metadata_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
FLOATING = [name for name in ITEMSIZE if name.startswith(("float", "bfloat", "complex"))]


@pytest.mark.parametrize("dtype", FLOATING)
@given(data=st.data())
def test_census_counts_what_torch_calls_nan_and_infinite(dtype, data):
    width = ITEMSIZE[dtype]
    special = st.sampled_from(
        [0x7F, 0x80, 0xFF, 0x00, 0x7C, 0xFC, 0xF0]
    )  # bytes of exponents that are all ones
    raw = bytes(data.draw(st.lists(special | st.integers(0, 255), min_size=width, max_size=8 * width)))
    raw = raw[: len(raw) // width * width]
    tensor = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if width == 1:  # torch has isnan of 8-bit floats only by way of wider ones
        parts = parts.to(torch.float32)
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


def test_integers_are_only_counted():
    census = Census()
    census.add(np.full(16, 0xFF, np.uint8), "int64")
    assert (census.elements, census.nans, census.infinities) == (16, 0, 0)


def test_a_writer_that_kept_no_checksums(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"w": torch.ones(1000), "v": 3}, checkpoint_id=tmp_path, no_dist=True)
    finally:
        torch.serialization.set_crc32_options(before)
    report = verify_checkpoint(str(tmp_path), None, VerifyOptions(content=True))
    assert report.is_valid
    (warning,) = [f for f in report.findings if f.check == "checksums"]
    assert "without a checksum" in warning.message


def test_an_item_with_a_transposed_tensor_and_values_that_are_none(tmp_path):
    tensor = torch.ones(300, 500)
    tensor[7, 11] = float("inf")
    dcp.save({"w": tensor.t()}, checkpoint_id=tmp_path, no_dist=True)
    report = verify_checkpoint(str(tmp_path), None, VerifyOptions(content=True))
    (finding,) = [f for f in report.findings if f.severity == "error"]
    assert (finding.check, finding.where) == ("values", "w")
    assert "0 NaN and 1 infinite of 150000" in finding.message


def test_a_compressed_record(tmp_path):
    root = copy_of("core019_llama_tp2_native_fsdp_dtensor", tmp_path)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(2, protocol=2))
    _replace_object(root, "iteration", stream.getvalue())
    report = verify_checkpoint(str(root))
    assert {f.check for f in report.findings} == {"common state", "frames"}
    assert all("is compressed, which torch.save never does" in f.message for f in report.findings)


class _Hostile:
    def __reduce__(self):
        return eval, ("__import__('pathlib').Path('hostile-was-here').touch()",)


def test_an_object_that_would_run_code_is_named_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = copy_of("core019_llama_tp2_native_fsdp_dtensor", tmp_path)
    stream = io.BytesIO()
    torch.save(_Hostile(), stream)
    _replace_object(root, "opt_param_scheduler.max_lr", stream.getvalue())
    report = verify_checkpoint(str(root), None, VerifyOptions(content=True))
    (finding,) = [f for f in report.findings if f.severity == "error"]
    assert (finding.check, finding.where) == ("frames", "opt_param_scheduler.max_lr")
    assert "eval" in finding.message
    assert not (tmp_path / "hostile-was-here").exists()


def _replace_object(root, key, archive):
    with metadata_of(root) as metadata:
        _, info = infos_of(metadata, key)[None]
        path = root / ITERATION / info.relative_path
        info.offset, info.length = path.stat().st_size, len(archive)
        with open(path, "ab") as file:
            file.write(archive)
