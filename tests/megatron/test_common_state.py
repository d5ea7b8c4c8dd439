"""The common state from its three places, and what it says about arguments and optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ckpt_tools.errors import CorruptCheckpointError, HostileCheckpointError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.run_state.common_state import CommonState, read_common_state
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import declared_layout, optimizer_layout
from tests.conftest import fixture_dir

LLAMA = "core019_llama_tp2_fully_reshardable"


def common_of(folder: Path) -> CommonState:
    files = open_files(str(folder))
    try:
        return read_common_state(files, read_catalog(files))
    finally:
        files.close()


@pytest.fixture
def iteration(tmp_path: Path) -> Path:
    shutil.copytree(fixture_dir(LLAMA) / "iter_0000002", tmp_path / "x", copy_function=shutil.copyfile)
    (tmp_path / "x").chmod(0o755)
    return tmp_path / "x"


def test_object_of_new_writers() -> None:
    common = common_of(fixture_dir(LLAMA) / "iter_0000002")
    assert (common.source, common.iteration) == ("common_state", 2)
    assert (common.arg("num_layers"), common.arg("absent", 7)) == (2, 7)
    assert common.args["swiglu"] is True
    assert common.values["checkpoint_version"] == 3.0


def test_items_of_fsdp_dtensor() -> None:
    common = common_of(fixture_dir("core019_llama_tp2_native_fsdp_dtensor") / "iter_0000002")
    assert (common.source, common.iteration, common.arg("hidden_size")) == ("items", 2, 32)


def test_common_pt_wins_over_the_object(iteration: Path) -> None:
    torch.save({"iteration": 9}, iteration / "common.pt")
    common = common_of(iteration)
    assert (common.source, common.iteration, common.args) == ("common.pt", 9, {})


def test_old_writers_have_the_file() -> None:
    common = common_of(fixture_dir("v011_dense_ms_tp2_dp1") / "checkpoint")
    assert (common.source, common.arg("tensor_model_parallel_size")) == ("common.pt", 2)


def test_bridge_has_its_model_configuration() -> None:
    common = common_of(fixture_dir("bridge_dense_fr_tp2_dp2") / "checkpoint")
    assert common.args == {}
    assert (common.arg("gated_linear_unit"), common.arg("num_layers")) == (True, 3)


def test_dumps_have_none() -> None:
    assert common_of(fixture_dir(LLAMA) / "param_to_param_group_map") == CommonState({}, None)


def test_damage_is_named(iteration: Path) -> None:
    torch.save([1], iteration / "common.pt")
    with pytest.raises(CorruptCheckpointError, match=r"common\.pt: holds a list, expected a dict"):
        common_of(iteration)
    torch.save({"f": shutil.copytree}, iteration / "common.pt")
    with pytest.raises(HostileCheckpointError, match=r"names shutil.'copytree'"):
        common_of(iteration)
    (iteration / "common.pt").unlink()
    (iteration / "run_config.yaml").write_text("model: [")
    with pytest.raises(CorruptCheckpointError, match=r"run_config\.yaml: not readable YAML"):
        common_of(iteration)
    (iteration / "run_config.yaml").write_text("a: !!python/object/apply:os.system ['id']")
    with pytest.raises(CorruptCheckpointError, match="could not determine a constructor"):
        common_of(iteration)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("core016_llama_tp2_dp_reshardable", "dp_reshardable"),
        ("core019_llama_tp2_fully_reshardable", "fully_reshardable"),
        ("v013_dense_dpzero_tp2_dp2", "dp_zero_gather_scatter"),
        ("v013_moe_ms_ep2", "fully_sharded_model_space"),
        ("v014_moe_dpzero_ep2", "dp_zero_gather_scatter"),
        ("v015_dense_ms_tp2_dp1_torchadam", "fully_sharded_model_space"),
    ],
)
def test_layouts_agree_with_what_their_writer_declared(name: str, layout: str) -> None:
    root = fixture_dir(name)
    folder = root / "checkpoint" if (root / "checkpoint").is_dir() else root / "iter_0000002"
    files = open_files(str(folder))
    catalog = read_catalog(files)
    common = read_common_state(files, catalog)
    files.close()
    assert optimizer_layout(catalog, common) == declared_layout(common) == layout


def test_layout_that_nobody_declared() -> None:
    root = fixture_dir("v016_dense_nodistopt_tp2") / "checkpoint"
    catalog = read_catalog(open_files(str(root)))
    assert optimizer_layout(catalog, CommonState({}, None)) == "non_distributed"
    assert declared_layout(CommonState({"optimizer": {0: {"param_state_sharding_type": "x"}}}, None)) == "x"
