"""Live names and fused projections, dialect by dialect."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.catalog.model import TensorEntry
from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.live import live_parameters
from ckpt_tools.megatron.names import DIALECTS, ModelStyle, depends_on_dialect, group_name, state_name
from ckpt_tools.megatron.torch_dist import slices_of

TE = ModelStyle(local_norms=False, grouped_experts=True)
LOCAL = ModelStyle(local_norms=True, grouped_experts=False)


def live(shapes: dict[str, tuple[int, ...]], style=TE, dialect="main", tp=1):
    stored = [p for key, shape in shapes.items() for p in slices_of(TensorEntry(key, "bfloat16", shape, ()))]
    return live_parameters(stored, style, DIALECTS[dialect], tp)


def test_local_norms_get_their_own_modules_back():
    shapes = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (4,),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_bias": (4,),
        "decoder.layers.0.input_layernorm.weight": (4,),
    }
    assert [p.name for p in live(shapes)] == list(shapes)
    del shapes["decoder.layers.0.input_layernorm.weight"]
    assert [p.name for p in live(shapes, LOCAL)] == [
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.pre_mlp_layernorm.bias",
    ]


def test_experts_grouped_and_sequential():
    shapes = {"decoder.layers.3.mlp.experts.experts.linear_fc1.weight": (2, 8, 4)}
    grouped, sequential = live(shapes, TE), live(shapes, LOCAL)
    assert [p.name for p in grouped] == [f"decoder.layers.3.mlp.experts.linear_fc1.weight{e}" for e in (0, 1)]
    assert [p.name for p in sequential] == [
        f"decoder.layers.3.mlp.experts.local_experts.{e}.linear_fc1.weight" for e in (0, 1)
    ]


@pytest.mark.parametrize(
    ("dialect", "state", "group"),
    [
        ("core-0.16", "transformer_layer", "transformer_layer"),
        ("core-0.17", "mtp_model_layer", "mtp_model_layer"),
        ("core-0.19", "mtp_model_layer", "mtp_model_layer"),
        ("main", "transformer_layer", "mtp_model_layer"),
        ("bridge", "mtp_model_layer", "mtp_model_layer"),
    ],
)
def test_mtp_inner_layer(dialect, state, group):
    (p,) = live({"mtp.layers.0.transformer_layer.input_layernorm.weight": (4,)}, dialect=dialect)
    assert (p.name, p.group_name) == (
        f"mtp.layers.0.{state}.input_layernorm.weight",
        f"mtp.layers.0.{group}.input_layernorm.weight",
    )


GDN = {f"decoder.layers.0.self_attention.in_proj.weight.{part}": (rows, 3) for part, rows in
       [("query", 4), ("key", 4), ("value", 8), ("z", 8), ("beta", 2), ("alpha", 2)]}  # fmt: skip


def test_gdn_rows_are_grouped_by_tensor_parallel_rank():
    (p,) = live(GDN, tp=2)
    assert (p.name, p.shape) == ("decoder.layers.0.self_attention.in_proj.weight", (28, 3))
    half = [2, 2, 4, 4, 1, 1]
    assert [r.count for r in p.rows] == half * 2
    assert [r.at for r in p.rows] == [sum((half * 2)[:i]) for i in range(12)]
    assert [r.start for r in p.rows] == [0] * 6 + half


def test_bridge_keeps_gdn_parts_but_groups_by_the_live_name():
    parts = live(GDN, dialect="bridge")
    assert [p.name for p in parts] == list(GDN)
    assert {p.group_name for p in parts} == {"decoder.layers.0.self_attention.in_proj.weight"}


_SEGMENTS = (
    "mtp",
    "mixer",
    "conv1d",
    "transformer_layer",
    "mtp_model_layer",
    "layers",
    "0",
    "weight",
    "amtp",
)


@given(st.lists(st.sampled_from(_SEGMENTS), min_size=1, max_size=6).map(".".join))
def test_only_names_that_depend_on_the_dialect_are_spelled_by_it(name):
    spelled = {spell(name, dialect) for dialect in DIALECTS.values() for spell in (state_name, group_name)}
    assert depends_on_dialect(name) or spelled == {name}


def test_mamba_conv_has_two_spellings():
    shapes = {f"decoder.layers.0.mixer.conv1d.bias.{part}": (4,) for part in ("x", "B", "C")}
    assert [p.name for p in live(shapes)] == ["decoder.layers.0.mixer.conv1d_bias"]
    assert [p.name for p in live(shapes, dialect="core-0.19")] == ["decoder.layers.0.mixer.conv1d.bias"]


def test_fused_mla_down_projection():
    style = ModelStyle(local_norms=False, grouped_experts=True, fused_mla_down=True)
    shapes = {
        "decoder.layers.0.self_attention.linear_q_down_proj.weight": (6, 4),
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight": (5, 4),
    }
    fused = "decoder.layers.0.self_attention.linear_qkv_down_proj.weight"
    unfused = live(shapes, style, "main", tp=2)
    assert [(p.name, p.group_name) for p in unfused] == [(key, fused) for key in shapes]
    (p,) = live(shapes, style, "core-0.19", tp=2)
    assert (p.name, p.group_name, p.shape, [(r.start, r.count, r.at) for r in p.rows]) == (
        fused,
        fused,
        (11, 4),
        [(0, 6, 0), (0, 5, 6)],
    )


def test_rows_that_tp_does_not_divide_are_refused():
    with pytest.raises(MappingError, match=r"part 'query' has 4 rows, which tensor parallel size 3 does not"):
        live(GDN, tp=3)


def test_a_missing_part_is_refused():
    shapes = {key: shape for key, shape in GDN.items() if not key.endswith("beta")}
    with pytest.raises(MappingError, match="do not make a whole fused projection"):
        live(shapes)
