"""`plan` and the placement options as users type them: what is told, and what is refused with which words."""

import json
import re
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.human import human_bytes
from tests.conftest import DATA, fixture_dir
from tests.pages import parse_page

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"


def plan(*words: object) -> int:
    return run(["plan", *map(str, words)])


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert plan(LLAMA, "--json", *words) == 0

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    return json.loads(capsys.readouterr().out, object_pairs_hook=unique)


@pytest.mark.parametrize("dp", [2, 3, 8])
def test_json_accounts_for_every_byte(dp, capsys):
    found = planned(capsys, "--dp-shard", dp)
    assert found["schema_version"] == 2
    assert len(found["ranks"]) == dp
    assert sum(rank["bytes"] for rank in found["ranks"]) == found["bytes_to_write"]
    assert len(found["items"]) == found["item_count"]
    covered: dict[str, int] = {}
    for item in found["items"]:
        covered[item["key"]] = covered.get(item["key"], 0) + prod(item["box"]["size"])
    for tensor in found["tensors"]:
        assert covered.pop(tensor["key"]) == prod(tensor["shape"])
    assert covered == {}
    assert sum(found["bytes_by_strategy"].values()) == sum(
        n for tensor in found["tensors"] for n in tensor["strategies"].values()
    )
    assert found["imbalance"] >= 1
    assert any("_extra_state" in line for line in found["dropped"])
    assert any("input_layernorm" in line for line in found["renamed"])


def test_the_plan_tells_the_changes_as_convert_does(tmp_path, capsys):
    assert plan(LLAMA, "--gpus", 2) == 0
    told = re.findall(r"^  \S.*", capsys.readouterr().out, re.MULTILINE)
    assert run(["convert", str(LLAMA), str(tmp_path / "out"), "--gpus", "2", "--dry-run", "-v"]) == 0
    assert {*told} <= {*capsys.readouterr().out.splitlines()}
    assert told[-1].startswith("  not part of fsdp_dtensor: Transformer Engine extra state (8 keys)")


def test_ranks_of_several_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ckpt_tools.plan.build.FILE_BYTES", 3000)
    found = planned(capsys, "--dp-shard", 3)
    assert run(["convert", str(LLAMA), str(tmp_path / "out"), "--dp-shard", "3", "--quiet"]) == 0
    sizes = {p.name: p.stat().st_size for p in tmp_path.glob("out/iter_*/*.distcp")}
    assert sorted(sizes) == sorted(name for rank in found["ranks"] for name in rank["files"])
    for rank in found["ranks"]:
        assert len(rank["files"]) > 3
        assert rank["bytes"] == sum(sizes[name] for name in rank["files"])
    capsys.readouterr()
    assert plan(LLAMA, "--dp-shard", 3) == 0
    shown = capsys.readouterr().out
    assert f"{found['imbalance']:.3f} (largest rank over the mean)" in shown
    assert f"__2_0.distcp ... {found['ranks'][2]['files'][-1]}" in shown


def test_one_rank_is_planned_as_in_the_plan_of_all(capsys):
    whole = planned(capsys, "--dp-shard", 3)
    for rank in range(3):
        alone = planned(capsys, "--dp-shard", 3, "--rank", rank)
        assert alone["ranks"] == [whole["ranks"][rank]]
        assert alone["items"] == [i for i in whole["items"] if i["file"] == f"__{rank}_0.distcp"]


def test_globs_choose_tensors(capsys):
    found = planned(capsys, "--dp-shard", 3, "--tensor", "*word_embeddings.weight.exp_avg")
    assert {t["key"].rpartition(".")[2] for t in found["tensors"]} == {"exp_avg"}
    assert plan(LLAMA, "--tensor", "*word_embeddings.weight", "--dp-shard", 3) == 0
    assert "[0:150, 0:32]" in capsys.readouterr().out
    assert plan(LLAMA, "--tensor", "nothing*") == 2
    assert "nothing*" in capsys.readouterr().err


def test_tables_of_every_layout(capsys):
    for words in ((), ("--world-size", 4), ("--dp-shard", 2, "--tp", 2), ("--dp-shard", 40)):
        assert plan(LLAMA, *words) == 0
        out = capsys.readouterr().out
        assert "would write" in out
        assert ("padding" in out) == ("--dp-shard" in words)


@pytest.mark.parametrize(
    "words",
    [
        ("--dp-shard", 8),
        ("--dp-shard", 1, "--tp", 2),
        ("--layout", "fsdp2", "--dp-shard", 5),
        ("--layout", "mfsdp-v2", "--dp-shard", 3, "--weights-only"),
        ("--world-size", 7),
        ("--dp-shard", 1024),
        ("--dp-shard", 3, "--strategy", "no_shard"),
    ],
)
def test_pictures_are_sound_and_bounded(words, tmp_path, capsys):
    """Well-formed XML; bars lie inside the drawing; a page needs nothing but itself."""
    gpt = "core019_gpt3_tp2_fully_reshardable"  # v2 has no form for a gated MLP yet
    source = fixture_dir(gpt) if "mfsdp-v2" in words else LLAMA
    assert plan(source, *words, "--svg", tmp_path / "a.svg", "--html", tmp_path / "a.html") == 0
    text = (tmp_path / "a.svg").read_text()
    root = ElementTree.fromstring(text)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    bars = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("x") and len(r)]
    paths = [p for p in root.iter("{http://www.w3.org/2000/svg}path") if len(p)]
    assert bars or paths
    for bar in bars:
        assert 0 <= float(bar.attrib["x"]) <= float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height
    assert len(text) < 2_000_000
    assert height < 1400
    page = (tmp_path / "a.html").read_text()
    assert not re.search(r"(?:src|href)=|@import|url\((?!#)", page)
    assert text.split("<style>")[0] in page
    parse_page(page)


def test_the_page_and_the_table_have_one_padding_and_one_memory(tmp_path, capsys):
    page = tmp_path / "a.html"
    assert plan(LLAMA, "--dp-shard", 3, "--json", "--html", page) == 0
    found = json.loads(capsys.readouterr().out)
    text = "".join(parse_page(page.read_text()).text)
    assert f"padding, of all buffers in training: {human_bytes(found['padding_bytes'])}. " in text
    for rank in found["ranks"]:
        peak = human_bytes(rank["memory"]["peak"])
        assert f"rank {rank['rank']}: Adam {human_bytes(rank['memory']['adam'])}" in text
        assert text.count(peak) >= 2
    assert sum(rank["memory"]["padding"] for rank in found["ranks"]) == found["padding_bytes"]


def test_impossible_ranks_are_refused_with_their_numbers(capsys):
    assert plan(fixture_dir("core019_moe_ep2_fully_reshardable"), "--dp-shard", 3, "--ep", 3) == 2
    assert "linear_fc1.weight: ep 3 does not divide the layer's 4 experts" in capsys.readouterr().err
    assert plan(LLAMA, "--dp-shard", 2, "--rank", 2) == 2
    assert "--rank 2: this layout has ranks 0 to 1" in capsys.readouterr().err


def with_names(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A weights-only checkpoint of zeros with these tensors."""
    import numpy as np
    import torch

    from tests.synthetic import DcpFolder

    out = DcpFolder(folder)
    for key, shape in shapes.items():
        out.tensor(key, "float32", np.zeros(shape, np.float32))
    out.finish()
    torch.save({"checkpoint_version": 3.0, "iteration": 1}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


def test_a_tensor_of_no_unit_is_named(tmp_path, capsys):
    source = with_names(tmp_path / "in", {"tower.blocks.0.weight": (4, 2), "output_layer.weight": (4, 2)})
    assert plan(source, "--dp-shard", 2, "--weights-only") == 2
    assert "no place in any FSDP unit" in (text := capsys.readouterr().err)
    assert "tower.blocks.0.weight" in text
    assert plan(source, "--dp-shard", 2, "--weights-only", "--layout", "fsdp2") == 0
    capsys.readouterr()


def test_a_cut_inside_a_row_is_refused_with_a_way_out(tmp_path, capsys):
    """7 x 10 makes the cell; the two 2 x 3 tensors behind it are cut in a row from 5 ranks on (sharding.md 2.2)."""
    shapes: dict[str, tuple[int, ...]] = {
        "output_layer.weight": (7, 10),
        "embedding.a.weight": (2, 3),
        "embedding.b.weight": (2, 3),
    }
    source = with_names(tmp_path / "in", shapes)
    words = ("--dp-shard", "5", "--weights-only")
    assert run(["convert", str(source), str(tmp_path / "out"), *words, "--quiet"]) == 2
    text = capsys.readouterr().err
    assert re.search(r"embedding\.[ab]\.weight: row \d of \(2, 3\), between rank \d and rank \d", text)
    assert re.search(r"Use dp_shard \d+, or --layout even", text)
    assert run(["convert", str(source), str(tmp_path / "out"), *words, "--quiet", "--layout", "even"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "sizes",
    [
        *(f"{name} {(1 << 20) + 1}" for name in ("--dp-shard", "--world-size", "--gpus")),
        *(f"--dp-shard 2 {name} {(1 << 20) + 1}" for name in ("--dp-outer", "--tp", "--cp", "--ep", "--etp", "--pp")),
        "--dp-shard 1024 --dp-outer 1024 --tp 2",  # each is possible, the job is not
    ],
)  # fmt: skip
def test_a_job_of_more_ranks_than_any_machine_has_is_refused_before_it_is_planned(sizes, capsys):
    assert plan(LLAMA, *sizes.split()) == 2
    assert "a job of more than 1,048,576 ranks is asked for" in capsys.readouterr().err
