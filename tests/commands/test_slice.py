"""`slice`: a few layers of every kind of checkpoint are a sound checkpoint whose values are the source's."""

import pytest

from ckpt_tools import convert_to_fsdp_dtensor, slice_layers
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import optimizer_layout
from ckpt_tools.megatron.torch_dist.read import read_torch_dist
from ckpt_tools.model.box import full_box
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source
from tests.folders import is_sound, root_of

TORCH_DIST = [
    "core019_llama_tp2_fully_reshardable", "core016_llama_tp2_dp_reshardable", "main_moe_fr_ep2",
    "v013_moe_ms_ep2", "v014_moe_dpzero_ep2", "v015_dense_ms_tp2_dp1_torchadam", "v016_dense_nodistopt_tp2",
    "main_llava_fr_tp2", "bridge_dense_fr_tp2_dp2",
]  # fmt: skip


def values_of(path):
    """{(kind, stored weight name with its layer, expert): bytes} of all weights and states."""
    with open_checkpoint(path) as opened:
        model = read_torch_dist(opened.files, opened.catalog, unknown_keys=True).model
        reader = BoxReader(opened.files, model.catalog)
        found = {}
        for p in model.parameters:
            for role, value in p.values.items():
                target = TargetTensor(p.name, value.dtype, value.shape, value.sources)
                found[role, p.name, p.expert] = reader.read(target, full_box(p.shape)).tobytes()
        reader.close()
        return found, model


@pytest.mark.parametrize("name", TORCH_DIST)
def test_a_layer_of_torch_dist(name, tmp_path):
    before, source = values_of(str(root_of(name)))
    block = "language_model.decoder.layers." if "llava" in name else None
    slice_layers(root_of(name), tmp_path / "out", "1:2", block)
    assert is_sound(tmp_path / "out")
    after, sliced = values_of(str(tmp_path / "out"))
    layers = block or "decoder.layers."
    expected = {}
    for (kind, parameter, expert), data in before.items():
        if not parameter.startswith(layers):
            expected[kind, parameter, expert] = data
        elif parameter.startswith(f"{layers}1."):
            expected[kind, parameter.replace(f"{layers}1.", f"{layers}0."), expert] = data
    assert after == expected
    assert len(sliced.groups) == len(source.groups)
    assert [dict(g) | {"step": 0} for g in sliced.groups] == [dict(g) | {"step": 0} for g in source.groups]


@pytest.mark.parametrize("name", TORCH_DIST[:4])
def test_what_was_sliced_converts(name, tmp_path):
    slice_layers(root_of(name), tmp_path / "small", "0:1")
    convert_to_fsdp_dtensor(tmp_path / "small", tmp_path / "fsdp")
    assert is_sound(tmp_path / "fsdp")


@pytest.mark.parametrize(
    "name", ["core019_llama_tp2_native_fsdp_dtensor", "core019_moe_dp1_native_fsdp_dtensor"]
)
def test_a_layer_of_fsdp_dtensor(name, tmp_path):
    edited = slice_layers(root_of(name), tmp_path / "out", "1:")
    assert is_sound(tmp_path / "out")
    with open_checkpoint(str(root_of(name))) as a, open_checkpoint(str(tmp_path / "out")) as b:
        edits = edited.edits
        kept = (key for key in a.catalog.tensors if key not in edits.removed)
        names = {edits.renamed.get(key, key): key for key in kept}
        assert names.keys() == b.catalog.tensors.keys()
        assert any(".layers.1." in old and ".layers.0." in new for new, old in names.items())
        for new, old in names.items():
            first, second = (
                BoxReader(side.files, side.catalog).read(
                    TargetTensor(
                        key, side.catalog.tensors[key].dtype, side.catalog.tensors[key].shape, (Source(key),)
                    ),
                    full_box(side.catalog.tensors[key].shape),
                )
                for side, key in ((a, old), (b, new))
            )
            assert first.tobytes() == second.tobytes(), new
        changed = {k for k, v in a.common.args.items() if b.common.args[k] != v}
        assert b.common.args["num_layers"] == 1
        assert changed <= {"num_layers", "encoder_num_layers", "moe_layer_freq"}
        if "moe" in name:
            assert a.common.args["moe_layer_freq"] == [0, 1]
            assert b.common.args["moe_layer_freq"] == [1]


def test_layouts_that_cannot_be_cut_come_out_fully_reshardable(tmp_path):
    slice_layers(root_of("core016_llama_tp2_dp_reshardable"), tmp_path / "out", "0:1")
    with open_checkpoint(str(tmp_path / "out")) as opened:
        assert optimizer_layout(opened.catalog, opened.common) == "fully_reshardable"
        assert opened.common.source == "common.pt"
        assert opened.common.args["num_layers"] == 1


def test_bridge_keeps_its_layers_in_its_configuration(tmp_path):
    slice_layers(root_of("bridge_dense_fr_tp2_dp2"), tmp_path / "out", ":2")
    with open_checkpoint(str(tmp_path / "out")) as opened:
        assert opened.common.model_config["num_layers"] == 2


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("linear_attention_freq_4", "0:4", {"linear_attention_freq": [1, 1, 1, 0]}),
        ("linear_attention_freq_4", "2:4", {"linear_attention_freq": [1, 0]}),
        ("linear_attention_freq_4", "3:4", {"linear_attention_freq": [0]}),
        ("window_list", "1:3", {"window_attn_skip_freq": [0, 1]}),
        ("te_moe_ep2_dpr", "0:1", {"moe_layer_freq": [0]}),
        ("core019_moe_dp1_native_fsdp_dtensor", "0:1", {"moe_layer_freq": [0]}),
    ],
)
def test_what_is_said_of_each_layer(name, layers, expected, user_cases, tmp_path):
    case = user_cases / "slice_layer_patterns" / name
    slice_layers(case if case.exists() else root_of(name), tmp_path / "out", layers)
    assert is_sound(tmp_path / "out")
    with open_checkpoint(str(tmp_path / "out")) as opened:
        assert {key: opened.common.args[key] for key in expected} == expected


def test_all_layers_are_the_same_checkpoint(tmp_path):
    from ckpt_tools.commands.check.diff import diff_checkpoints

    place = str(root_of("core019_moe_ep2_fully_reshardable"))
    slice_layers(place, tmp_path / "out", ":")
    assert diff_checkpoints(place, tmp_path / "out").is_equal


@pytest.mark.parametrize("layers", ["2:3", "1:1", "0", "a:b", "-1:", "0:3"])
def test_ranges_that_are_none(layers, tmp_path):
    with pytest.raises(UsageError, match="--layers"):
        slice_layers(root_of(TORCH_DIST[0]), tmp_path / "out", layers)
    assert list(tmp_path.iterdir()) == []


def test_several_blocks_have_to_be_chosen_from(tmp_path):
    with pytest.raises(UsageError, match=r"--block.*language_model.*vision_model"):
        slice_layers(root_of("main_llava_fr_tp2"), tmp_path / "out", "0:1")
    with pytest.raises(UsageError, match="no such layers"):
        slice_layers(root_of(TORCH_DIST[0]), tmp_path / "out", "0:1", "encoder.layers")
