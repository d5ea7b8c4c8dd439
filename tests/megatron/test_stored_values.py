"""The kinds of values that stored settings have: anything else is refused by name."""

import pytest

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.formats.pickle.unpickle import stand_in
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor
from ckpt_tools.megatron.huggingface.config.ledger import arguments
from ckpt_tools.megatron.run_state.stored_values import FLAGS, TEXTS, check_settings
from ckpt_tools.verify.readiness.job import VERSIONS, flags_named
from tests.conftest import all_checkpoints
from tests.megatron.test_common_state import read

NUMPY_FALSE = stand_in("numpy._core.multiarray", "scalar")("dtype", b"\0")
TENSOR_FALSE = StoredTensor("bool", (), b"\0")
MEMBER = stand_in("megatron.core.enums", "Fp8Recipe")("delayed")
NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((flag, [NUMPY_FALSE, TENSOR_FALSE, "False", 0, 1.0, [], b""]) for flag in sorted(FLAGS)),
        *((text, [NUMPY_FALSE, TENSOR_FALSE, False, 1e308, b"x", []]) for text in sorted(TEXTS)),
        ("hidden_size", [None, NUMPY_FALSE, True, 1.0, "8", -1]),
        ("consumed_train_samples", ["x", -1, 1.5]),
        ("iteration", ["x", [], -1]),
        ("moe_layer_freq", [{}, 0, "[1]", [1, "x"]]),
        ("rotary_base", [0, -1, NAN, "x", [10000, 0], True]),
        ("layernorm_epsilon", [-1, NAN, "1e-5", NUMPY_FALSE]),
        ("rotary_percent", ["x", True, TENSOR_FALSE]),
        ("window_size", ["x", (1.0, 0), {}]),
        ("rope_scaling", [NUMPY_FALSE, 1]),
        ("checkpoint_version", [["a", None], "3"]),
        ("num_floating_point_operations_so_far", [[1], "x", 1e300, True]),
        ("transformer", [{"swiglu": "yes"}]),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(name, values):
    for value in values:
        with pytest.raises(CorruptCheckpointError, match=rf"^args\.{name}.* belongs there"):
            check_settings({name: value}, "args")


@pytest.mark.parametrize(
    "settings",
    [
        dict.fromkeys((*FLAGS, *TEXTS, "rotary_base", "moe_layer_freq", "window_size", "rope_scaling")),
        dict.fromkeys(FLAGS, False),
        {"fp8_recipe": MEMBER, "position_embedding_type": {"_target_": "x"}, "normalization": "RMSNorm"},
        {"rotary_base": [10000, 1000000.0], "window_size": 7, "rope_scaling": {"factor": 8}},
        {"window_size": (-1, 0), "interleaved_attn_pattern": [5, 1], "moe_layer_freq": [0, 1]},
        {"num_floating_point_operations_so_far": 10**25, "layernorm_epsilon": 0, "no_rope_freq": 0},
        {"a_setting_of_somebody": NUMPY_FALSE},
    ],
)
def test_what_megatron_stores_is_taken(settings):
    check_settings(settings, "args")


def test_every_switch_that_decides_an_export_is_a_flag():
    kinds: dict[str, set[str]] = {}
    for version in VERSIONS:
        for name, flags in flags_named(version).items():
            kinds.setdefault(name, set()).update(flag.kind for flag in flags)
    assert not {name for name in FLAGS if "store" in kinds.get(name, ())}
    read_names = {*arguments().carried, *arguments().changes}
    assert not {name for name in read_names if "store" not in kinds.get(name, {"store"})} - FLAGS


@pytest.mark.parametrize("folder", all_checkpoints().values(), ids=all_checkpoints())
def test_every_real_checkpoint_has_values_of_these_kinds(folder):
    for metadata in folder.rglob(".metadata"):
        read(metadata.parent)
