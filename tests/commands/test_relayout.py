"""An `fsdp_dtensor` checkpoint for another topology: what the direct conversion for that topology gives."""

import re
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools import ConvertOptions, Layout, TargetOptions, Topology, convert_to_fsdp_dtensor
from ckpt_tools.cli.app import run
from ckpt_tools.model.choices import LayoutName
from tests.commands import oracle
from tests.commands.test_to_fsdp_dtensor import options_of, source_of
from tests.conftest import DATA, fixture_dir

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
DP3, DP2_TP2 = Topology(dp_shard=3), Topology(dp_shard=2, tp=2)


def laid_out(
    source: Path,
    output: Path,
    topology: Topology,
    layout: LayoutName = "mfsdp-v1",
    target: TargetOptions | None = None,
) -> Path:
    options = ConvertOptions(
        target=target or TargetOptions(), layout=Layout(layout, topology), check_masters="none"
    )
    convert_to_fsdp_dtensor(source, output, options)
    return output


def contents(folder: Path) -> tuple[dict[str, list[tuple[Any, ...]]], dict[str, object]]:
    """Chunk boxes and file names by key, and planner paths."""
    known = oracle.metadata(folder)
    files: dict[str, list[tuple[Any, ...]]] = {}
    for index, info in known.storage_data.items():
        files.setdefault(index.fqn, []).append((tuple(index.offset or ()), info.relative_path))
    return {key: sorted(found) for key, found in files.items()}, known.planner_data


def stored_bytes(folder: Path, keys: list[str]) -> dict[str, bytes]:
    """The archive of every object."""
    found = {}
    for index, info in oracle.metadata(folder).storage_data.items():
        if index.fqn in keys:
            data = (oracle.files_of(folder) / info.relative_path).read_bytes()
            found[index.fqn] = data[info.offset : info.offset + info.length]
    return found


MODELS = (  # one of every architecture: how the optimizer was stored is gone after the first conversion
    "core019_llama_tp2_fully_reshardable", "core019_gpt3_tp2_fully_reshardable", "core019_moe_ep2_fully_reshardable",
    "main_dense_dpr_pp2_vpp2_tied", "main_gdn_fr_tp2", "main_llava_fr_tp2", "main_mla_mtp_moe_fr_tp2",
    "bridge_dense_fr_tp2_dp2",
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_over_another_topology_or_straight_is_the_same(name, tmp_path):
    """TP 1 on the way: fused projections are regrouped, and rng states of the lost rank come from the kept one."""
    case = fixture_dir(name)
    spec = TargetOptions(layer_spec=options_of(case).layer_spec)
    straight = laid_out(source_of(case), tmp_path / "straight", DP2_TP2, target=spec)
    first = laid_out(source_of(case), tmp_path / "first", DP3, target=spec)
    second = laid_out(first, tmp_path / "second", DP2_TP2, target=spec)
    tensors, expected = oracle.tensors(second), oracle.tensors(straight)
    assert tensors.keys() == expected.keys()
    different = [key for key in expected if not oracle.same_bytes(tensors[key], expected[key])]
    assert all(key.startswith("rng_state.(0, 1)") for key in different)
    assert contents(second) == contents(straight)


def test_a_native_checkpoint_is_laid_out(tmp_path, capsys):
    """One that Megatron-FSDP wrote, for three ranks and for five rows of files."""
    native = next(fixture_dir("core019_llama_tp2_native_fsdp_dtensor").glob("iter_*"))
    words = ["--quiet", "--dp-shard", "3", "--tp", "2"]
    assert run(["convert", str(native), str(tmp_path / "out"), *words]) == 0
    assert run(["convert", str(native), str(tmp_path / "even"), "--quiet", "--world-size", "5"]) == 0
    capsys.readouterr()
    expected = oracle.tensors(native)
    for name, files in (("out", 6), ("even", 5)):
        folder = next((tmp_path / name).glob("iter_*"))
        found = oracle.tensors(folder)
        oracle.assert_same(found, expected)
        assert len(list(folder.rglob("*.distcp"))) == files


def test_options_that_would_change_the_content_are_refused(tmp_path, capsys):
    first = laid_out(LLAMA, tmp_path / "a", DP3)
    for words in (["--weights-only"], ["--vocab-size-padded", "256"], ["--target", "bridge"]):
        assert run(["convert", str(first), str(tmp_path / "b"), "--quiet", *words]) == 2
        assert "already an fsdp_dtensor checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_projections_that_cannot_be_regrouped_are_named(tmp_path, capsys):
    gdn = source_of(fixture_dir("main_gdn_fr_tp2"))
    first = laid_out(gdn, tmp_path / "a", Topology(1, tp=2))
    assert run(["convert", str(first), str(tmp_path / "b"), "--quiet", "--dp-shard", "1", "--tp", "16"]) == 2
    assert re.search(
        r"\d+ attention heads are not a multiple of tensor parallel size 16", capsys.readouterr().err
    )


@pytest.mark.parametrize(("tp", "note"), [(4, "ranks 2 to 3: copied"), (1, "rank 1: dropped")])
def test_rng_of_more_or_fewer_ranks(tp, note, tmp_path, capsys):
    """A rank that the source does not have gets the last one's states; the others keep their own, to the byte."""
    first = laid_out(LLAMA / "iter_0000002", tmp_path / "a", DP2_TP2) / "iter_0000002"
    assert run(["convert", str(first), str(tmp_path / "b"), "--tp", str(tp)]) == 0
    assert f"rng of tensor-parallel {note}" in capsys.readouterr().out
    prefix = "rng_state.(0, "
    old, new = (
        {
            key: data
            for key, data in stored_bytes(folder, list(oracle.metadata(folder).state_dict_metadata)).items()
            if key.startswith(prefix)
        }
        for folder in (first, tmp_path / "b" / "iter_0000002")
    )
    ranks = {int(key.removeprefix(prefix).partition(")")[0]) for key in new}
    assert ranks == set(range(tp))
    for rank in ranks:
        own, source = f"{prefix}{rank})", f"{prefix}{min(rank, 1)})"
        expected = {key.replace(source, own): data for key, data in old.items() if key.startswith(source)}
        assert {key: data for key, data in new.items() if key.startswith(own)} == expected
    assert {k.replace("(0, 0)", ""): v for k, v in old.items() if "(0, 0)" in k} != {
        k.replace("(0, 1)", ""): v for k, v in old.items() if "(0, 1)" in k
    }
