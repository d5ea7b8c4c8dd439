"""Shards for a running job, on real processes: straight from checkpoints, and by stock torch from laid out ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.commands.look.load_dtensors import mesh_axes
from ckpt_tools.errors import UsageError
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.sharding.topology import Topology
from tests.commands import oracle
from tests.commands.launched import torchrun
from tests.commands.test_to_fsdp_dtensor import source_of
from tests.conftest import fixture_dir

LLAMA, MOE = "core019_llama_tp2_fully_reshardable", "core019_moe_ep2_fully_reshardable"
GDN, GPT = "main_gdn_fr_tp2", "core019_gpt3_tp2_fully_reshardable"


def case(name: str, layout: str, mesh: dict[str, int], ep: int = 1) -> dict[str, Any]:
    label = f"{name}-{layout}-{'-'.join(f'{k}{v}' for k, v in mesh.items())}-ep{ep}"
    sizes = {"axes": list(mesh), "mesh": list(mesh.values()), "ep": ep}
    return {"name": label, "fixture": name, "layout": layout, "device": "cpu", **sizes}


THREE = [case(LLAMA, "mfsdp-v1", {"dp_shard": 3}), case(LLAMA, "fsdp2", {"fsdp": 3})]
THREE += [case(MOE, "mfsdp-v1", {"dp_shard": 3})]
TWO = [case(LLAMA, "mfsdp-v1", {"dp_shard": 1, "tp": 2}), case(LLAMA, "fsdp2", {"dp": 1, "tp": 2})]
TWO += [case(MOE, "mfsdp-v1", {"dp_shard": 2}, ep=2), case(GDN, "mfsdp-v1", {"dp_shard": 1, "tp": 2})]
TWO += [case(LLAMA, "mfsdp-v1", {"dp_outer": 2, "dp_shard": 1})]


def run_job(cases: list[dict[str, Any]], ranks: int, tmp_path: Path) -> list[dict[str, Any]]:
    """What every rank of a torchrun job reports."""
    for c in cases:
        source = source_of(fixture_dir(c["fixture"]))
        sizes = {"dp_shard": 1} | {{"fsdp": "dp_shard", "dp": "dp_shard"}.get(a, a): n
                                   for a, n in zip(c["axes"], c["mesh"], strict=True)}  # fmt: skip
        topology = Topology(**sizes, ep=c["ep"])
        whole, laid_out = (
            tmp_path / f"{c['name']}.{name}" / "iter_0000001" for name in ("whole", "laid_out")
        )
        layouts: tuple[tuple[Path, LayoutName], ...] = ((whole, "even"), (laid_out, c["layout"]))
        for folder, layout in layouts:
            options = ConvertOptions(layout=Layout(layout, topology), check_masters="none")
            convert_to_fsdp_dtensor(str(source), str(folder), options)
        truth = oracle.tensors(whole)
        torch.save(truth, tmp_path / f"{c['name']}.pt")
        c |= {"source": str(source), "converted": str(laid_out), "truth": str(tmp_path / f"{c['name']}.pt")}
    return torchrun("dtensor_worker", cases, ranks, tmp_path / "scratch")


def assert_all_equal(result: dict[str, Any], name: str) -> None:
    for check in ("wrong", "wrong_from_converted", "wrong_stock", "wrong_saved_again"):
        assert result[check] == [], (name, check)
    assert result["same_keys"], name
    assert result["shards"] > 0, name
    assert result["front_to_back"], name


def test_three_ranks_hold_their_rows_and_open_one_file_each(tmp_path):
    """Equal to the source bit for bit: loaded by us, loaded by stock torch, saved again and loaded again."""
    results = run_job(THREE, 3, tmp_path)
    for c in THREE:
        name = c["name"]
        truth = torch.load(c["truth"], weights_only=True)
        for rank, result in enumerate(results):
            assert_all_equal(result[name], name)
            assert result[name]["opened"] == [f"__{rank}_0.distcp"], name
        whole = [k for k in truth if k.startswith("rng") or k.endswith((".step", "expert_bias"))]
        sharded = sum(tensor.numel() for key, tensor in truth.items() if key not in whole)
        assert sum(r[name]["elements"] for r in results) == sharded
        assert any(r[name]["uneven"] for r in results), name
        assert set(results[0][name]["keys"]) == set(truth), name


def test_two_ranks_along_every_kind_of_axis(tmp_path):
    """Tensor, expert and replicated data parallelism: what is replicated may stand in a peer's file."""
    results = run_job(TWO, 2, tmp_path)
    for c in TWO:
        for rank, result in enumerate(results):
            assert_all_equal(result[c["name"]], c["name"])
            assert set(result[c["name"]]["opened"]) <= {"__0_0.distcp", f"__{rank}_0.distcp"}
    experts = [{k for k in r[TWO[2]["name"]]["keys"] if ".experts." in k} for r in results]
    assert experts[0]
    assert experts[1]
    assert not experts[0] & experts[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_over_nccl(tmp_path):
    cases = [{**case(MOE, "mfsdp-v1", {"dp_shard": 2}, ep=2), "device": "cuda"}]
    cases += [{**case(LLAMA, "mfsdp-v1", {"dp_shard": 2}), "device": "cuda"}]
    for result in run_job(cases, 2, tmp_path):
        for c in cases:
            assert_all_equal(result[c["name"]], c["name"])


@pytest.mark.parametrize(
    ("names", "shape", "expected"),
    [
        (None, (4,), {"dp_shard": 4}),
        (("fsdp",), (4,), {"dp_shard": 4}),
        (("dp_replicate", "fsdp", "tp"), (2, 3, 4), {"dp_outer": 2, "dp_shard": 3, "tp": 4}),
        (("tp",), (4,), {"dp_shard": 1, "tp": 4}),
    ],
)
def test_names_of_axes(names, shape, expected):
    assert mesh_axes(names, shape) == expected


@pytest.mark.parametrize(
    ("names", "shape"), [(None, (2, 2)), (("tp", "dp"), (2, 2)), (("dp", "fsdp"), (2, 2)), (("pp",), (2,))]
)
def test_unknown_axes_are_refused_by_name(names, shape):
    with pytest.raises(UsageError, match="dp_shard"):
        mesh_axes(names, shape)


def test_even_is_no_layout_of_a_job(tmp_path):
    with pytest.raises(UsageError, match="even says how files are cut"):
        ckpt_tools.load_dtensors(str(tmp_path), None, "even")
