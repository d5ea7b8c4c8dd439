"""The common state from its three places, and what it says about arguments and optimizer."""

import shutil
from pathlib import Path

import pytest
import torch

from ckpt_tools.errors import CorruptCheckpointError, HostileCheckpointError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.run_state.common_state import CommonState, read_common_state
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import declared_layout, optimizer_layout
from ckpt_tools.model.catalog import Catalog
from tests.conftest import fixture_dir

LLAMA = "core019_llama_tp2_fully_reshardable"


def read(folder: Path) -> tuple[Catalog, CommonState]:
    files = open_files(str(folder))
    catalog = read_catalog(files)
    return catalog, read_common_state(files, catalog)


@pytest.fixture
def iteration(tmp_path: Path) -> Path:
    shutil.copytree(fixture_dir(LLAMA) / "iter_0000002", tmp_path / "x", copy_function=shutil.copyfile)
    (tmp_path / "x").chmod(0o755)
    return tmp_path / "x"


@pytest.mark.parametrize(
    ("folder", "source", "iteration", "args"),
    [
        (f"{LLAMA}/iter_0000002", "common_state", 2, {"num_layers": 2, "swiglu": True}),
        ("core019_llama_tp2_native_fsdp_dtensor/iter_0000002", "items", 2, {"hidden_size": 32}),
        ("v011_dense_ms_tp2_dp1/checkpoint", "common.pt", 2, {"tensor_model_parallel_size": 2}),
        ("bridge_dense_fr_tp2_dp2/checkpoint", "common_state", 2, {"gated_linear_unit": True, "num_layers": 3}),
        (f"{LLAMA}/param_to_param_group_map", None, None, {}),
    ],
)  # fmt: skip
def test_where_it_is(folder, source, iteration, args):
    name, _, below = folder.partition("/")
    common = read(fixture_dir(name) / below)[1]
    assert (common.source, common.iteration) == (source, iteration)
    assert {name: common.arg(name) for name in args} == args
    assert common.arg("absent", 7) == 7
    assert bool(common.args) is (source is not None and "bridge" not in folder)


def test_common_pt_wins_over_the_object(iteration):
    torch.save({"iteration": 9}, iteration / "common.pt")
    common = read(iteration)[1]
    assert (common.source, common.iteration, common.args) == ("common.pt", 9, {})


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("common.pt", [1], CorruptCheckpointError, r"common\.pt: holds a list, expected a dict"),
        ("common.pt", {"f": shutil.copytree}, HostileCheckpointError, r"names shutil.'copytree'"),
        ("run_config.yaml", "model: [", CorruptCheckpointError, r"run_config\.yaml: not readable YAML"),
        (
            "run_config.yaml",
            "a: !!python/object/apply:os.system ['id']",
            CorruptCheckpointError,
            "constructor",
        ),
    ],
)
def test_damage_is_named(iteration, file, content, error, message):
    if isinstance(content, str):
        (iteration / file).write_text(content)
    else:
        torch.save(content, iteration / file)
    with pytest.raises(error, match=message):
        read(iteration)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("core016_llama_tp2_dp_reshardable/iter_0000002", "dp_reshardable"),
        (f"{LLAMA}/iter_0000002", "fully_reshardable"),
        ("v013_dense_dpzero_tp2_dp2/checkpoint", "dp_zero_gather_scatter"),
        ("v013_moe_ms_ep2/checkpoint", "fully_sharded_model_space"),
    ],
)
def test_layouts_agree_with_what_their_writer_declared(name, layout):
    root, _, folder = name.partition("/")
    catalog, common = read(fixture_dir(root) / folder)
    assert optimizer_layout(catalog, common) == declared_layout(common) == layout


def test_layout_that_nobody_declared():
    catalog, _ = read(fixture_dir("v016_dense_nodistopt_tp2") / "checkpoint")
    assert optimizer_layout(catalog, CommonState({}, None)) == "non_distributed"
    assert declared_layout(CommonState({"optimizer": {0: {"param_state_sharding_type": "x"}}}, None)) == "x"
