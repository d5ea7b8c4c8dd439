"""Masters that are compared while they are summed: the report is that of two passes, each byte is read once."""

import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tools.commands.check import verify_checks
from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.execute.proof.masters import MastersReport, compare_all_masters
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.verify.content.content import master_pairs
from ckpt_tools.verify.report import Report, VerifyOptions
from tests.conftest import LLAMA, REPO
from tests.damage import ITERATION, copy_of, payload_of, replace_chunk

WEIGHT = "decoder.layers.mlp.linear_fc2.weight"
MASTER = f"optimizer.state.param.{WEIGHT}"
NAN, INFINITY = np.float32(np.nan), np.float32(np.inf)


def _report(root: Path) -> Report:
    return verify_checkpoint(root, options=VerifyOptions(content=True, workers=1, threads=1))


def _first_place(root: Path, key: str) -> tuple[int, ...]:
    return min(c.box.start for c in read_catalog(LocalFiles(str(root / ITERATION))).tensors[key].chunks)


def _set(root: Path, key: str, dtype: str, values: dict[int, float]) -> None:
    """Other elements in the first chunk of a tensor, in an archive that is sound."""
    place = _first_place(root, key)
    numbers = np.frombuffer(
        payload_of(root, key, place)[2], np.float32 if dtype == "float32" else np.uint16
    ).copy()
    for at, value in values.items():
        numbers[at] = value if dtype == "float32" else np.float32(value).view(np.uint32) >> 16
    replace_chunk(root, key, place, dtype, numbers.tobytes())


@pytest.mark.parametrize(
    ("masters", "weights"),
    [
        ({}, {}),
        ({5: 2.0}, {}),
        ({}, {5: 2.0}),
        ({5: 2.0}, {5: 2.0}),
        ({0: NAN}, {}),
        ({0: NAN, -1: 3.0}, {0: NAN}),
        ({0: NAN}, {0: NAN}),
        ({7: -INFINITY}, {7: -INFINITY}),
        ({7: INFINITY}, {7: -INFINITY}),
        ({7: 3.4e38}, {7: INFINITY}),
        ({-1: NAN}, {-1: 0.0}),
    ],
)
def test_the_report_is_that_of_two_passes(masters, weights, tmp_path, monkeypatch):
    root = copy_of(LLAMA, tmp_path)
    _set(root, MASTER, "float32", masters)
    _set(root, WEIGHT, "bfloat16", weights)
    monkeypatch.setattr("ckpt_tools.verify.content.content._BESIDE_ELEMS", 100)
    monkeypatch.setattr("ckpt_tools.verify.content.content._PART_BYTES", 2048)
    beside = _report(root)
    monkeypatch.setattr("ckpt_tools.verify.content.content.master_pairs", lambda _: {})
    assert _report(root) == beside
    assert beside.is_valid == ((not masters and not weights) or masters == weights == {5: 2.0})


@pytest.mark.parametrize("key", [MASTER, WEIGHT])
@pytest.mark.parametrize("damage", ["cut", "flipped", "no frame"])
def test_so_it_is_of_damaged_files(key, damage, tmp_path, monkeypatch):
    root = copy_of(LLAMA, tmp_path)
    path, start, data = payload_of(root, key, _first_place(root, key))
    with path.open("r+b") as file:
        if damage == "cut":
            file.truncate(start + len(data) // 2)
        else:
            file.seek(start + (len(data) // 2 if damage == "flipped" else -70))
            file.write(b"\x41")
    beside = _report(root)
    assert not beside.is_valid
    monkeypatch.setattr("ckpt_tools.verify.content.content.master_pairs", lambda _: {})
    assert _report(root) == beside


def test_each_byte_of_a_tensor_is_read_once(tmp_path, monkeypatch):
    read: Counter[tuple[str, int]] = Counter()
    whole = LocalFiles.read_into

    def counted(files: LocalFiles, name: str, offset: int, buffer: memoryview) -> None:
        read[name, offset] += len(buffer) >= 1024
        whole(files, name, offset, buffer)

    root = copy_of(LLAMA, tmp_path)
    catalog = read_catalog(LocalFiles(str(root / ITERATION)))
    pairs = master_pairs(catalog)
    masters = [key for key in catalog.tensors if key.startswith("optimizer.state.param.")]
    assert len(pairs) == sum(len(catalog.tensors[key].chunks) for key in masters)
    monkeypatch.setattr(LocalFiles, "read_into", counted)
    monkeypatch.setattr(verify_checks, "compare_all_masters", partial(_without_reading, read))
    assert _report(root).is_valid
    seen = Counter(read)
    for key in (MASTER, WEIGHT):
        for chunk in catalog.tensors[key].chunks:
            path, start, _ = payload_of(root, key, chunk.box.start)
            assert seen[path.name, start] == 1, key


def _without_reading(read: Counter[tuple[str, int]], *given: Any) -> tuple[MastersReport, list[str]]:
    before = read.total()
    report, problems = compare_all_masters(*given)
    assert read.total() == before, "all is known from the scan"
    assert report.elements == report.elements_in_all > 0
    return report, problems


def test_convert_names_every_tensor_whoever_compares_it(tmp_path):
    """In other processes, because one with threads, as pytest's may be, is not forked."""
    root = copy_of(LLAMA, tmp_path)
    for weight in (WEIGHT, "decoder.layers.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"):
        _set(root, f"optimizer.state.param.{weight}", "float32", {3: 7.0})
    told = set()
    for workers in "13":
        words = [
            "convert",
            str(root),
            str(tmp_path / "out"),
            "-q",
            "--check-masters",
            "all",
            "--workers",
            workers,
        ]
        command = [sys.executable, "-m", "ckpt_tools", *words]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
        assert done.returncode == 6
        told.add(done.stderr)
    (text,) = told
    assert "the master weights of 3 tensors do not round" in text or text.count("master 7.0") == 3, text
