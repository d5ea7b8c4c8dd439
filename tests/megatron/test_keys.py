"""Every form of a key is taken apart in one place, and names one thing: a parameter of a layer and an expert."""

import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import MappingError
from ckpt_tools.formats.locate import detect
from ckpt_tools.megatron import keys
from ckpt_tools.megatron.fsdp_dtensor.parameters import LiveParameter, Rows
from ckpt_tools.megatron.fsdp_dtensor.tensors import model_tensors
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import bucket_states
from ckpt_tools.megatron.torch_dist.read import dropped_objects
from ckpt_tools.megatron.torch_dist.stacking import (
    SortedKeys,
    layer_counts,
    missing_layers,
    slices_of,
    sort_keys,
)
from ckpt_tools.model.catalog import Catalog, Item, ObjectEntry, TensorEntry, Value
from ckpt_tools.model.model import Parameter
from ckpt_tools.model.views import Source
from tests.conftest import REPO

FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
DIST = "optimizer.distributed.dp_group_idx_3"
BUCKET = f"{DIST}.gbuf_idx_1.dtype_(torch.bfloat16, torch.float32).bucket_idx_2"
WRAPPED = f"module.module.module.{FC1}"

# key -> what each function says of it; every other function of the list says None
FORMS: dict[str, dict[str, Any]] = {
    f"optimizer.state.exp_avg.{FC1}": {"state_key": ("exp_avg", FC1)},
    f"chained_1.optimizer.state.fp32_param.{FC1}": {"state_key": ("fp32_param", FC1)},
    f"{BUCKET}.exp_avg": {"bucket_key": (BUCKET, 0, 3, 1, "bfloat16", 2, "exp_avg")},
    f"chained_12.{BUCKET}.param": {"bucket_key": (f"chained_12.{BUCKET}", 12, 3, 1, "bfloat16", 2, "param")},
    f"{DIST}.optimizer/shard_0_1": {
        "bucket_object": (0, 3, "optimizer"),
        "object_shard": (f"{DIST}.optimizer", (0,), (1,)),
    },
    f"chained_1.{DIST}.param_state/shard_0.1_2.2": {
        "bucket_object": (1, 3, "param_state"),
        "object_shard": (f"chained_1.{DIST}.param_state", (0, 1), (2, 2)),
    },
    "rng_state/shard_0.1_1.2": {"rng_shard": (0, 1, None), "object_shard": ("rng_state", (0, 1), (1, 2))},
    "rng_state/shard_0.1.3_1.2.4": {
        "rng_shard": (0, 1, 3),
        "object_shard": ("rng_state", (0, 1, 3), (1, 2, 4)),
    },
    "rng_state/shard_0_1": {"object_shard": ("rng_state", (0,), (1,))},
    "my_rng_state/shard_0.1_1.2": {"object_shard": ("my_rng_state", (0, 1), (1, 2))},
    "common_state/shard_0_1": {"object_shard": ("common_state", (0,), (1,))},
    f"model.module.{FC1}": {"parameter_of": (FC1, "weight")},
    f"model.{FC1}_w": {"parameter_of": (f"{FC1}_w", "weight")},
    f"optimizer.state.{WRAPPED}_w.exp_avg": {"parameter_of": (f"{FC1}_w", "exp_avg")},
    f"optimizer.param_to_group_meta.{WRAPPED}.lr": {"group_key": (FC1, "lr")},
    "rng_state.(0, 1).0.np_rng_state.0": {"rng_key": (0, 1, "0.np_rng_state.0")},
    FC1: {},
    "opt_param_scheduler.max_lr": {},
    "args": {},
}
EITHER = {"state_key", "parameter_of"}  # `optimizer.state.` begins a state of either format
FUNCTIONS = ("state_key", "bucket_key", "bucket_object", "object_shard", "rng_shard", "group_key", "rng_key")


@pytest.mark.parametrize("key", FORMS)
def test_every_form_is_of_one_kind(key):
    expected = FORMS[key]
    for name in (*FUNCTIONS, "parameter_of"):
        if not (EITHER & expected.keys() and name in EITHER - expected.keys()):
            assert getattr(keys, name)(key) == expected.get(name), name
    assert keys.is_optimizer_key(key) is ("optimizer." in key)
    is_fsdp = detect._FSDP_KEY.search(key.encode()) is not None  # detection goes by the bytes of keys
    assert is_fsdp == ("model.module." in key or "state.module." in key or keys.group_key(key) is not None)


@pytest.mark.parametrize("key", ["decoder.optimizer.weight", "chained_x.optimizer.state"])
def test_keys_that_only_look_like_an_optimizers(key):
    assert not keys.is_optimizer_key(key)


@pytest.mark.parametrize(
    ("key", "role"),
    [
        (FC1, "weight"),
        ("decoder.final_layernorm.exp_avg", "weight"),
        (f"model.module.{FC1}_w", "weight"),
        (f"optimizer.state.param.{FC1}", "master"),
        (f"chained_0.optimizer.state.fp32_param.{FC1}", "master"),
        (f"optimizer.state.exp_avg_sq.{FC1}", "exp_avg_sq"),
        (f"optimizer.state.momentum_buffer.{FC1}", "other"),  # ends like a weight
        (f"{BUCKET}.exp_avg", "exp_avg"),
        (f"chained_1.{BUCKET}.param", "master"),
        (f"optimizer.state.{WRAPPED}_w.exp_avg", "exp_avg"),
        (f"optimizer.state.{WRAPPED}.step", "other"),
        ("chained_0.optimizer.step", "other"),
        ("opt_param_scheduler.max_lr", "other"),
        ("rng_state.(0, 0).0.cuda_rng_state", "other"),
    ],
)
def test_the_role_of_a_tensor(key, role):
    assert keys.role_of(key) == role


@pytest.mark.parametrize("digits", [10, 5000])
@pytest.mark.parametrize(
    ("function", "form"),
    [
        ("rng_key", "rng_state.({}, 0).0"),
        ("rank_of", "({}, 0)"),
        ("bucket_key", f"{BUCKET.removesuffix('2')}{{}}.param"),
        ("bucket_object", "optimizer.distributed.dp_group_idx_{}.optimizer/shard_0_1"),
        ("layer_of", "decoder.layers.{}.x"),
    ],
)  # fmt: skip
def test_a_number_that_no_job_has_is_not_computed_with(function, form, digits):
    assert getattr(keys, function)(form.format("1" * 9)) is not None
    assert getattr(keys, function)(form.format("1" * digits)) is None
    assert keys.object_shard(f"a/shard_0_{'1' * 5000}") is None
    assert keys.split_expert(f"a.experts.linear_fc1.weight{'1' * 5000}")[1] is None


@given(st.lists(st.integers(0, 10**18 - 1), min_size=1), st.lists(st.integers(0, 9), min_size=1))
def test_shard_keys_go_both_ways(place, grid):
    key = keys.shard_key("a/shard_0.b", place, grid)
    assert keys.object_shard(key) == ("a/shard_0.b", tuple(place), tuple(grid))


@given(st.integers(0, 10**9 - 1), st.booleans(), st.sampled_from(["linear_fc1.weight", "linear_fc2.bias"]))
def test_expert_names_go_both_ways(expert, grouped, leaf):
    name = f"decoder.layers.3.mlp.experts.experts.{leaf}"
    assert keys.split_expert(keys.expert_name(name, expert, grouped)) == (name, expert)
    assert keys.split_expert(name) == (name, None)


@pytest.mark.parametrize("leaf", ["weight", "weight7", "bias"])
def test_halves(leaf):
    name = f"decoder.layers.0.mlp.linear_fc1.{leaf}"
    assert keys.split_half(name) == (name, "")
    for half in keys.HALVES:
        assert keys.split_half(name + half) == (name, half)
    assert keys.split_half("decoder.mixer.norm_w") == ("decoder.mixer.norm_w", "")
    assert keys.split_expert_half("a.linear_fc1.weight_w7") == ("a.linear_fc1.weight7", "_w")


def test_layers_and_experts_of_stored_names():
    stacked = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert keys.stacked_axes(stacked) == 2
    assert keys.layer_of(stacked) is None
    single = "mtp.layers.1.transformer_layer.mlp.experts.experts.7.linear_fc1.weight"
    assert keys.stacked_axes(single) == 0
    assert keys.layer_of(single) == ("mtp.layers.", 1, single.removeprefix("mtp.layers.1."))
    assert keys.expert_of(single) == (single.replace(".7.", "."), 7)
    assert keys.layer_of("vision.layers.2.layers.3.x") == ("vision.layers.", 2, "layers.3.x")


@pytest.mark.parametrize(
    ("key", "is_known"),
    [
        (keys.COMMON_OBJECT, True),
        ("common_state/shard_1_2", False),  # which is not read
        ("rng_state/shard_0.1_1.2", True),
        ("rng_state/shard_0.1_x", False),  # of no grid
    ],
)
def test_objects_that_are_accounted_for(key, is_known):
    objects = SortedKeys((), (), (key,))
    if is_known:
        assert dropped_objects(objects, frozenset(), unknown_keys=False) == []
    else:
        with pytest.raises(MappingError, match=re.escape(key)):
            dropped_objects(objects, frozenset(), unknown_keys=False)


SPELLED = re.compile(
    r"optimizer\\\.|chained_\\?[\[(\\]|rng_state\\\.|/shard_[\\(]|layers\\\.\(|experts\\\.\("
)


def test_no_other_module_spells_a_key_as_a_pattern():
    found = {
        str(path.relative_to(REPO / "ckpt_tools"))
        for path in (REPO / "ckpt_tools").rglob("*.py")
        if SPELLED.search(path.read_text()) and path.name != "keys.py"
    }
    assert found <= {
        "formats/locate/detect.py",  # tells the format from raw bytes, before there are keys
        "sharding/units.py",
        "commands/check/preflight.py",
        "commands/convert/picture.py",
    }


def test_a_key_that_no_layout_has_is_not_taken_for_a_state_of_a_bucket():
    strange = f"{DIST}.gbuf_idx_1.dtype_(bfloat16).bucket_idx_2.exp_avg"
    stored = {key: TensorEntry(key, "float32", (64,), ()) for key in (f"{BUCKET}.exp_avg", strange)}
    about = {f"{DIST}.optimizer/shard_0_1": ObjectEntry(f"{DIST}.optimizer/shard_0_1", Item("x", 0, 1))}
    states = bucket_states(Catalog("memory", stored, about), "dp_reshardable", (), ())
    assert states.consumed == {f"{BUCKET}.exp_avg", *about}
    with pytest.raises(MappingError, match=re.escape(strange)):
        dropped_objects(SortedKeys((), tuple(stored), tuple(about)), states.consumed, unknown_keys=False)


@pytest.mark.parametrize("leaf", ["router.expert_bias", "router.local_tokens_per_expert", "router.weight"])
def test_buffers_keep_their_type_whatever_the_model_is_cast_to(leaf):
    """A loader makes them in fp32; of two lists of buffers one did not have the tokens of an expert."""
    name = f"decoder.layers.0.mlp.{leaf}"
    stored = Parameter(name, (4,), "float32", {"weight": Value("float32", (4,), (Source(name),))})
    live = LiveParameter(name, name, (4,), (Rows(stored, 0, 4),))
    (tensor,) = model_tensors(live, keys.MODEL_PREFIX, "bfloat16")
    assert tensor.dtype == ("float32" if leaf.endswith(keys.BUFFERS) else "bfloat16")
    assert leaf.endswith(keys.BUFFERS) is (leaf != "router.weight")


def test_who_reads_keys_alone_pays_for_no_numbers():
    """`inspect` is asked for often, and numpy costs it a third of its time."""
    program = "import sys, ckpt_tools.commands.look.inspect; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def entry(key, *shape):
    return TensorEntry(key, "bfloat16", shape, ())


def catalog(*entries):
    return Catalog("", {e.key: e for e in entries}, {})


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        ("mtp.layers.a.weight", (3, 8, 4), [(f"mtp.layers.{i}.a.weight", (i,), (8, 4), None) for i in range(3)]),
        ("layers.experts.experts.fc1", (2, 3, 8),
         [(f"layers.{i}.experts.experts.fc1", (i, e), (8,), e) for i in range(2) for e in range(3)]),
        ("layers.7.experts.experts.fc2", (2, 4),
         [("layers.7.experts.experts.fc2", (e,), (4,), e) for e in range(2)]),
        ("layers.7.norm", (4,), [("layers.7.norm", (), (4,), None)]),
        ("layers.3.mtp.layers.weight", (1,), [("layers.3.mtp.layers.0.weight", (0,), (), None)]),
        ("layers.experts.experts.5.fc", (1, 4), [("layers.0.experts.experts.fc", (0,), (4,), 5)]),
    ],
)  # fmt: skip
def test_slices_of_a_stored_weight(key, shape, expected):
    assert [(p.name, p.lead, p.shape, p.expert) for p in slices_of(entry(key, *shape))] == expected


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("decoder.layers.2.a.weight", r"decoder\.layers\.\*: layers \[0, 1\] are missing below layer 2"),
        ("decoder.layers.0.x.adapter.linear_in.weight", r"x\.adapter\.linear_in\.weight: adapter weights"),
        ("decoder.layers.experts.experts.fc1.weight", "too short"),
    ],
)
def test_what_is_no_whole_model_is_refused(key, message):
    with pytest.raises(MappingError, match=message):
        sort_keys(catalog(entry(key, 4)))


def test_a_gap_of_any_size_is_named_in_few_words():
    (line,) = missing_layers(["decoder.layers.0.x", "decoder.layers.999999999.x"])
    assert "999999998 layers" in line
    assert len(line) < 200


def test_layer_counts_by_block():
    names = [
        "decoder.layers.0.a",
        "decoder.layers.1.a",
        "mtp.layers.0.transformer_layer.a",
        "output_layer.weight",
    ]
    assert layer_counts(names) == {"decoder.layers.": 2, "mtp.layers.": 1}


def test_the_wrapper_of_nemo_is_no_part_of_a_name():
    keys = sort_keys(
        catalog(entry("module.layers.a.weight", 2, 4), entry("module.output_layer.weight", 4, 4))
    )
    assert [(p.name, p.key) for p in keys.parameters] == [
        ("layers.0.a.weight", "module.layers.a.weight"),
        ("layers.1.a.weight", "module.layers.a.weight"),
        ("output_layer.weight", "module.output_layer.weight"),
    ]
