"""`strip`: the weights byte for byte where they were, nothing of the optimizer, and a checkpoint that still works."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from ckpt_tools import TargetOptions, strip_checkpoint
from ckpt_tools.cli.app import run
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.errors import UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.pickle.unpickle import StandIn
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import optimizer_layout
from tests.commands import oracle
from tests.commands.made import dcp, fsdp, hf, iteration_of, stripped, torch_dist
from tests.conftest import DATA, fixture_dir
from tests.damage import ITERATION, copy_of, flip_bit, payload_of
from tests.folders import content, is_sound, root_of

RUN, MOE = DATA / "core019_llama_tp2_fully_reshardable", "core019_moe_ep2_fully_reshardable"
FSDP = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
TORCH_DIST = [
    "core019_moe_ep2_fully_reshardable", "core016_llama_tp2_dp_reshardable", "v013_moe_ms_ep2",
    "v014_moe_dpzero_ep2", "v015_dense_ms_tp2_dp1_torchadam", "v016_dense_nodistopt_tp2",
    "bridge_dense_fr_tp2_dp2", "te_remainder8_tp2_dpr", "te_fp8_tp2_fr",
]  # fmt: skip
NATIVE = ["core019_llama_tp2_native_fsdp_dtensor", "core019_moe_dp1_native_fsdp_dtensor", "n_moe_ep2"]
OF_THE_OPTIMIZER = ("optimizer", "chained_", "opt_param_scheduler", "rng_state", "rerun_state")


@pytest.mark.parametrize("name", TORCH_DIST + NATIVE)
def test_the_weights_stay_where_they_were(name, tmp_path):
    done = strip_checkpoint(root_of(name), tmp_path / "out")
    before, after = iteration_of(name), iteration_of(tmp_path / "out")
    was, now = oracle.metadata(before), oracle.metadata(after)
    kept = {key for key in was.state_dict_metadata if not key.startswith(OF_THE_OPTIMIZER)}
    assert now.state_dict_metadata.keys() == kept
    assert set(was.state_dict_metadata) - kept == {
        key for key in done.edits.removed if not key.startswith("common")
    }
    old, new = oracle.tensors(before), oracle.tensors(after)
    for key, value in new.items():
        assert oracle.same_bytes(value, old[key]), key
        boxes = [{(*c.offsets, *c.sizes) for c in m.state_dict_metadata[key].chunks} for m in (was, now)]
        assert boxes[0] == boxes[1], key
    for key in kept - new.keys() - {"common_state/shard_0_1"}:
        found, expected = (oracle.item(folder, key) for folder in (after, before))
        assert repr(found) == repr(expected) or found == expected, key
    assert done.edits.cast == ()
    assert done.written is not None
    assert done.masters.use == ("as_stored" if done.source_format == "fsdp_dtensor" else "left_out")
    assert done.written.rounded_elements == 0
    assert is_sound(tmp_path / "out")


@pytest.mark.parametrize("name", TORCH_DIST)
def test_the_common_state_says_nothing_of_an_optimizer(name):
    """It has the entries of a job that saved with --no-save-optim --no-save-rng."""
    with open_checkpoint(str(root_of(name))) as a, open_checkpoint(str(stripped(name))) as b:
        was, now = a.common, b.common
        assert (was.source, was.args, was.model_config) == (now.source, now.args, now.model_config)
        assert isinstance(now.values.get("args"), StandIn) == isinstance(was.values.get("args"), StandIn)
        usual = {"args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far"}
        assert now.values.keys() <= usual | {"content_metadata"}
        assert now.values.keys() >= was.values.keys() & usual
        assert not any(
            "optim_sharding" in name or "reshardable" in name for name in now.values["content_metadata"]
        )
        assert optimizer_layout(b.catalog, now) == "none"


def test_the_same_entries_as_a_job_without_optimizer_writes():
    ours, theirs = stripped("v016_dense_fr_tp2_dp2_te"), root_of("v016_dense_weightsonly_tp2")
    with open_checkpoint(str(theirs)) as a, open_checkpoint(str(ours)) as b:
        assert a.common.values.keys() == b.common.values.keys()
        assert a.common.values["content_metadata"] == b.common.values["content_metadata"]


@pytest.mark.parametrize("name", NATIVE)
def test_masters_cast_to_the_models_type(name, tmp_path):
    done = strip_checkpoint(root_of(name), tmp_path / "out", "bfloat16")
    old, new = map(oracle.tensors, (iteration_of(name), tmp_path / "out"))
    rounded = 0
    for key, found in new.items():
        is_buffer = key.endswith(".expert_bias")
        expected = old[key] if is_buffer else old[key].bfloat16()
        assert oracle.same_bytes(found, expected), key
        rounded += int((found.float() != old[key]).sum())
    assert rounded
    assert done.written is not None
    assert done.written.rounded_elements == rounded
    assert set(done.edits.cast) == {key for key in new if not key.endswith(".expert_bias")}
    assert is_sound(tmp_path / "out")


def test_it_holds_what_a_conversion_of_the_weights_holds():
    oracle.assert_same(stripped(fsdp(MOE), "bfloat16"), fsdp(MOE, weights_only=True, dtype="bfloat16"))


@pytest.mark.parametrize("name", [RUN.name, FSDP.name])
def test_what_was_stripped_is_exported_as_the_whole(name):
    assert content(hf(stripped(name))) == content(hf(name))


def test_what_was_stripped_converts_there_and_back():
    weights = stripped(MOE)
    oracle.assert_same(torch_dist(fsdp(weights)), weights)


def test_only_what_is_kept_is_read(tmp_path, capsys):
    key = "decoder.final_layernorm.weight"
    root = copy_of(RUN.name, tmp_path)
    path, at, _ = payload_of(root, f"optimizer.state.exp_avg.{key}", (0,))
    flip_bit(path, at)
    assert run(["strip", str(root), str(tmp_path / "out"), "-q"]) == 0
    path, at, _ = payload_of(root, key, (0,))
    flip_bit(path, at)
    assert run(["strip", str(root), str(tmp_path / "out2"), "-q"]) == 4
    assert key in capsys.readouterr().err
    assert not (tmp_path / "out2" / ITERATION).exists()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bf16"])
def test_other_types_are_refused(dtype, tmp_path):
    with pytest.raises(UsageError, match=f"--dtype {dtype}: weights can be written as bfloat16"):
        strip_checkpoint(FSDP, tmp_path / "out", dtype)


def test_what_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is torch_dist; its weights already have the job's element type"):
        strip_checkpoint(RUN, tmp_path / "out", "bfloat16")
    with pytest.raises(UsageError, match="holds weights alone"):
        strip_checkpoint(stripped(RUN.name), tmp_path / "out")
    with pytest.raises(UsageError, match="overlap"):
        strip_checkpoint(RUN, RUN / ITERATION)
    with pytest.raises(
        UnsupportedCheckpointError, match="is a Hugging Face model, which holds weights alone"
    ):
        strip_checkpoint(hf(RUN.name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Net(torch.nn.Module):
    """A model of nobody's, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("frequencies", torch.arange(3.0))


def plain_state(flat: bool) -> dict[str, Any]:
    """As programs save one: everything under names of its own, or, as torchtitan, the model's at the top."""
    net = Net()
    adam = torch.optim.AdamW(net.parameters())
    net.layers[1](net.layers[0](torch.ones(4))).sum().backward()
    adam.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(net, adam, options=options)
    rest = {"lr_scheduler": {"last_epoch": 3}, "train_state": {"step": torch.tensor(3)}}
    return (
        {**weights, **rest, "optimizer": states} if flat else {"model": weights, **rest, "optimizer": states}
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("flat", [False, True])
def test_a_plain_state_dict_keeps_its_model(flat, tmp_path):
    state = plain_state(flat)
    torch_dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    done = strip_checkpoint(tmp_path / "in", tmp_path / "out")
    weights = Net().state_dict()
    names = {name if flat else f"model.{name}" for name in weights}
    assert set(oracle.metadata(tmp_path / "out").state_dict_metadata) == names
    assert any("exp_avg" in key for key in done.edits.removed)
    assert any(key.startswith("lr_scheduler") for key in done.edits.removed)
    empty = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    torch_dcp.load(empty if flat else {"model": empty}, checkpoint_id=tmp_path / "out", no_dist=True)
    expected = state if flat else state["model"]
    assert all(oracle.same_bytes(empty[name], expected[name]) for name in weights)
    assert is_sound(tmp_path / "out")
    with pytest.raises(UsageError, match="holds weights alone"):
        strip_checkpoint(tmp_path / "out", tmp_path / "again")
    with pytest.raises(UsageError, match="is dcp; its weights already have the job's element type"):
        strip_checkpoint(tmp_path / "in", tmp_path / "again", "bfloat16")
    with pytest.raises(UsageError, match="its program makes its own optimizer"):
        strip_checkpoint(tmp_path / "in", tmp_path / "again", fresh=TargetOptions(fresh_optimizer=True))


@pytest.mark.parametrize(("name", "root"), [("module_num_rng", "module"), ("net_epoch", "net")])
def test_no_weight_is_left_out_whatever_its_dict_is_called(name, root, user_cases, tmp_path):
    source = user_cases / "dcp_model_root" / name
    assert is_sound(source)
    model = {key: value for key, value in oracle.tensors(source).items() if key.startswith(f"{root}.")}
    strip_checkpoint(source, tmp_path / "out")
    assert run(["convert", str(source), str(tmp_path / "cut"), "--to", "dcp", "--dp-shard", "2", "-q"]) == 0
    for folder, kept in (("out", model), ("cut", oracle.tensors(source))):
        found = oracle.tensors(tmp_path / folder)
        oracle.assert_same(found, kept)


def test_a_plain_state_dict_of_megatron_is_converted(tmp_path):
    """Its kind is told by its optimizer: without one it would be taken for Megatron-FSDP's."""
    source = dcp(RUN)
    with pytest.raises(UnsupportedCheckpointError, match="`convert --to torch_dist --weights-only`"):
        strip_checkpoint(source, tmp_path / "out")
    torch_dist(source, weights_only=True)
