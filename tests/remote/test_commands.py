"""Every command with URLs, source and target: the results of local paths, and nothing local written."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_tools.cli.app import run
from ckpt_tools.formats.storage import object_store as store_module
from tests.conftest import fixture_dir
from tests.folders import content

SOURCE = fixture_dir("core019_llama_tp2_fully_reshardable")
WEIGHT = "model.module.decoder.layers.0.mlp.linear_fc2.weight"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """`memory://in` holds a run; the working directory is empty and stays so."""
    fs = MemoryFileSystem()
    fs.put(str(SOURCE), "/in", recursive=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    assert list((tmp_path / "here").iterdir()) == []


def _far(fs: MemoryFileSystem, root: str) -> dict[str, bytes]:
    return {path.removeprefix(f"{root}/"): fs.cat_file(path, None, None) for path in fs.find(root)}


def test_conversions_write_what_they_write_to_a_disk(store, tmp_path):
    steps = [
        (["convert", "IN", "OUT", "--dp-shard", "4", "--tp", "2"], "in", "fsdp"),
        (["convert-fsdp-dtensor-to-torch-dist", "IN", "OUT"], "fsdp", "back"),
        (["slice", "IN", "OUT", "--layers", "0:1"], "in", "slice"),
        (["modify-state-dict", "IN", "OUT", "--op", "remove rng_state"], "fsdp", "modified"),
        (["strip", "IN", "OUT"], "in", "weights"),
        (["average", "IN", "IN", "OUT"], "in", "mean"),
        (["export-hf", "IN", "OUT"], "fsdp", "hf"),
        (["average", "IN", "IN", "OUT"], "hf", "hf-mean"),
    ]
    for words, source, target in steps:
        local = {"IN": str(SOURCE if source == "in" else tmp_path / source), "OUT": str(tmp_path / target)}
        far = {"IN": f"memory://{source}", "OUT": f"memory://{target}"}
        for names in (local, far):
            assert run([names.get(word, word) for word in words]) == 0, words
        assert _far(store, f"/{target}") == content(tmp_path / target), words


def test_a_model_is_imported_from_a_store(store):
    assert run(["export-hf", "memory://in", "memory://hf"]) == 0
    rates = ["--lr", "1e-5", "--min-lr", "1e-6", "--weight-decay", "0.1"]
    assert run(["import-hf", "memory://hf", "memory://imported", "--to", "fsdp_dtensor", *rates]) == 0
    assert run(["verify", "memory://imported", "--content"]) == 0


def test_what_reads_only(capsys):
    assert run(["convert", "memory://in", "memory://fsdp", "--quiet"]) == 0
    capsys.readouterr()
    for words in [
        ["inspect", "memory://fsdp"],
        ["verify", "memory://fsdp", "--content"],
        ["diff", "memory://in", "memory://fsdp"],
        ["diff", str(SOURCE), "memory://in"],
        ["preflight", "memory://fsdp"],
        ["print-tensor", "memory://fsdp", WEIGHT, "--stats"],
        ["print-torch-dcp-in-json", "memory://in/param_to_param_group_map", "--no-write"],
        ["build-param-group-map", "memory://in"],
    ]:
        assert run(words) == 0, words
        assert capsys.readouterr().out, words


def test_overlap_and_absence_are_told_in_terms_of_urls(capsys):
    assert run(["convert", "memory://in", "memory://in/x"]) == 2
    assert "the output memory://in/x and the source memory://in overlap" in capsys.readouterr().err
    assert run(["inspect", "memory://nowhere"]) == 3
    assert "memory://nowhere does not exist" in capsys.readouterr().err


def test_msc_is_opened_when_asked_for(tmp_path, monkeypatch, capsys):
    pytest.importorskip("multistorageclient", reason="multi-storage-client is not installed")
    provider = {"type": "file", "options": {"base_path": str(SOURCE)}}
    (tmp_path / "out").mkdir()
    target = {"type": "file", "options": {"base_path": str(tmp_path / "out")}}
    profiles = {"lab": {"storage_provider": provider}, "out": {"storage_provider": target}}
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": profiles}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    monkeypatch.setattr(store_module, "_ASKED_FOR", set())
    assert run(["inspect", "msc://lab/iter_0000002"]) == 2
    assert "add --enable-msc" in capsys.readouterr().err
    assert run(["convert", "msc://lab/iter_0000002", "msc://out/fsdp", "--enable-msc", "--quiet"]) == 0
    assert run(["verify", str(tmp_path / "out" / "fsdp"), "--content"]) == 0
