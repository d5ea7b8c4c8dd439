"""Live names and fused projections, dialect by dialect; and live tensors back to stored parameters."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.megatron.fsdp_dtensor.parameters import FsdpTensor, live_parameters, stored_parameters
from ckpt_tools.megatron.names import DIALECTS, ModelStyle
from ckpt_tools.megatron.torch_dist.stacking import slices_of
from ckpt_tools.model.catalog import TensorEntry, Value
from ckpt_tools.model.model import Parameter
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.views import Source

TE = ModelStyle(local_norms=False, grouped_experts=True)
LOCAL = ModelStyle(local_norms=True, grouped_experts=False)


def live(shapes: Mapping[str, tuple[int, ...]], style=TE, dialect="main", tp=1):
    slices = [p for key, shape in shapes.items() for p in slices_of(TensorEntry(key, "bfloat16", shape, ()))]
    stored = [Parameter(p.name, p.shape, p.dtype, {}, p.expert) for p in slices]
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


GDN_PARTS = {f"decoder.layers.0.self_attention.in_proj.weight.{part}": (rows, 3) for part, rows in
       [("query", 4), ("key", 4), ("value", 8), ("z", 8), ("beta", 2), ("alpha", 2)]}  # fmt: skip


def test_bridge_keeps_gdn_parts_but_groups_by_the_live_name():
    parts = live(GDN_PARTS, dialect="bridge")
    assert [p.name for p in parts] == list(GDN_PARTS)
    assert {p.group_name for p in parts} == {"decoder.layers.0.self_attention.in_proj.weight"}


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
    assert (p.name, p.group_name, p.shape, [(r.start, r.count) for r in p.rows]) == (
        fused,
        fused,
        (11, 4),
        [(0, 6), (0, 5)],
    )


@pytest.mark.parametrize("order", [("_w", "_v"), ("_v", "_w")])
@pytest.mark.parametrize("expert", ["", "3"])
def test_the_gate_stands_before_the_up_projection(order, expert):
    """Megatron's fused fc1 is [gate; up]: `_w` and `_v` of whatever order they are stored in."""
    base = "decoder.layers.0.mlp.linear_fc1.weight"
    (p,) = live({f"{base}{half}{expert}": (rows, 3) for half, rows in zip(order, (4, 4), strict=True)}, tp=2)
    assert (p.name, p.shape) == (f"{base}{expert}", (8, 3))
    assert [(r.parameter.name.removeprefix(base), r.start, r.count) for r in p.rows] == [
        (f"_w{expert}", 0, 4),
        (f"_v{expert}", 0, 4),
    ]


def test_rows_that_tp_does_not_divide_are_refused():
    with pytest.raises(MappingError, match=r"part 'query' has 4 rows, which tensor parallel size 3 does not"):
        live(GDN_PARTS, tp=3)


def test_a_missing_part_is_refused():
    shapes = {key: shape for key, shape in GDN_PARTS.items() if not key.endswith("beta")}
    with pytest.raises(MappingError, match="do not make a whole fused projection"):
        live(shapes)


# As sharded_state_dict splits them: gated_delta_net/{gdn,gdn2,common}.py, mamba_mixer.py. Parts of different sizes.
PACKED: dict[str, list[tuple[tuple[str, int], ...]]] = {
    "self_attention.in_proj.weight": [
        (("query", 4), ("key", 6), ("value", 8), ("z", 10), ("beta", 2), ("alpha", 12)),
        (("query", 4), ("key", 6), ("value", 8), ("z", 10), ("f", 2), ("b", 12), ("w", 14)),
    ],
    "self_attention.conv1d.weight": [(("query", 4), ("key", 6), ("value", 8))],
    "mixer.in_proj.weight": [(("z", 8), ("x", 10), ("B", 4), ("C", 6), ("dt", 2))],
    "mixer.conv1d.weight": [(("x", 10), ("B", 4), ("C", 6))],
    "mixer.conv1d.bias": [(("x", 10), ("B", 4), ("C", 6))],
}


@pytest.mark.parametrize("stored_order", [1, -1])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("name", "parts"), [(name, parts) for name, kinds in PACKED.items() for parts in kinds]
)
def test_packed_rows_are_those_that_the_ranks_hold(name, parts, tp, stored_order):
    """Against whole arrays: every rank's slice of every part, as it stands in the rank's own projection."""
    base = f"decoder.layers.0.{name}"
    (found,) = live({f"{base}.{part}": (rows, 3) for part, rows in parts[::stored_order]}, tp=tp)
    values = {part: [f"{part}{row}" for row in range(rows)] for part, rows in parts}
    ranks = [
        [row for part, rows in parts for row in values[part][rank * rows // tp : (rank + 1) * rows // tp]]
        for rank in range(tp)
    ]
    packed = []
    for rows in found.rows:
        part = rows.parameter.name.rpartition(".")[2]
        packed += values[part][rows.start : rows.start + rows.count]
    assert len(packed) == found.shape[0]
    assert packed == [row for rank in ranks for row in rank]
    assert found.is_packed


def test_bridge_fuses_mamba_though_one_part_has_the_name_of_a_gated_delta_nets():
    parts = dict(PACKED["mixer.in_proj.weight"][0])
    (found,) = live(
        {f"l.0.mixer.in_proj.weight.{p}": (n, 3) for p, n in parts.items()}, dialect="bridge", tp=2
    )
    assert (found.name, found.shape) == ("l.0.mixer.in_proj.weight", (30, 3))


def test_what_is_not_packed():
    assert not any(p.is_packed for p in live(GDN_PARTS, dialect="bridge"))
    whole = {"decoder.layers.0.self_attention.linear_qkv.weight": (12, 4)}
    halves = {f"decoder.layers.0.mlp.linear_fc1.weight{half}": (4, 3) for half in ("_w", "_v")}
    fused = {f"l.0.self_attention.linear_{n}_down_proj.weight": (4, 3) for n in ("q", "kv")}
    style = ModelStyle(local_norms=False, grouped_experts=True, fused_mla_down=True)
    found = live({**whole, **halves, **fused}, style, dialect="bridge", tp=2)
    assert len(found) == 3
    assert not any(p.is_packed for p in found)


ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": (4,),
    "self_attention.linear_qkv.layer_norm_bias": (4,),
    "self_attention.linear_qkv.weight": (12, 4),
    "self_attention.linear_proj.weight": (4, 4),
}
MLA = {
    "input_layernorm.weight": (4,),
    "self_attention.linear_q_down_proj.weight": (6, 4),
    "self_attention.linear_kv_down_proj.weight": (5, 4),
    "self_attention.linear_q_up_proj.weight": (8, 6),
    "self_attention.linear_kv_up_proj.weight": (8, 3),
}
GDN = {
    "self_attention.in_proj.layer_norm_weight": (4,),
    **{
        f"self_attention.in_proj.weight.{part}": (rows, 4)
        for part, rows in zip(
            ("query", "key", "value", "z", "beta", "alpha"), (4, 4, 8, 8, 2, 2), strict=True
        )
    },
    **{
        f"self_attention.conv1d.weight.{part}": (rows, 1, 3)
        for part, rows in (("query", 4), ("key", 4), ("value", 8))
    },
    "self_attention.A_log": (2,),
    "self_attention.dt_bias": (2,),
    "self_attention.out_norm.weight": (4,),
    "self_attention.out_proj.weight": (4, 8),
}
GDN2 = {name: shape for name, shape in GDN.items() if not name.endswith((".beta", ".alpha", ".dt_bias"))} | {
    **{f"self_attention.in_proj.weight.{part}": (rows, 4) for part, rows in (("f", 4), ("b", 4), ("w", 8))},
    "self_attention.dt_bias": (4,),
}
MAMBA = {
    **{
        f"mixer.in_proj.weight.{part}": (rows, 4)
        for part, rows in (("z", 8), ("x", 8), ("B", 4), ("C", 4), ("dt", 2))
    },
    **{
        f"mixer.conv1d.{leaf}.{part}": (rows, *rest)
        for leaf, rest in (("weight", (1, 3)), ("bias", ()))
        for part, rows in (("x", 8), ("B", 4), ("C", 4))
    },
    "mixer.A_log": (2,),
    "mixer.D": (2,),
    "mixer.dt_bias": (2,),
    "mixer.out_proj.weight": (4, 8),
}
DENSE = {
    "mlp.linear_fc1.layer_norm_weight": (4,),
    "mlp.linear_fc1.weight": (8, 4),
    "mlp.linear_fc2.weight": (4, 8),
}
MOE = {
    "mlp.router.weight": (2, 4),
    "mlp.router.expert_bias": (2,),
    "mlp.experts.experts.linear_fc1.weight": (2, 8, 4),
    "mlp.experts.experts.linear_fc1.bias": (2, 8),
    "mlp.experts.experts.linear_fc2.weight": (2, 4, 8),
}
PREFIXES = ("decoder.layers.3.", "mtp.layers.0.transformer_layer.", "language_model.decoder.layers.0.")


@st.composite
def layers(draw):
    """(prefix, shapes, whether norms are stored under the names of fused ones) of one transformer layer."""
    mixer = draw(st.sampled_from([ATTENTION, MLA, GDN, GDN2, MAMBA]))
    mlp = draw(st.sampled_from([DENSE, MOE]))
    shapes = {**mixer, **mlp}
    if mlp is MOE or mixer is MLA:
        shapes = {**shapes, "pre_mlp_layernorm.weight": (4,)}
    return draw(st.sampled_from(PREFIXES)), shapes, mixer is ATTENTION


def parameters_of(shapes):
    return [p for key, shape in shapes.items() for p in slices_of(TensorEntry(key, "bfloat16", shape, ()))]


def as_tensors(live):
    return [FsdpTensor(p.name, p.shape, {WEIGHT: Value("float32", p.shape, (Source(p.name),))}) for p in live]


@given(
    layers(),
    st.sampled_from(sorted(DIALECTS)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_stored_parameters_undo_live_ones(layer, dialect, local, grouped, fused_mla, tp):
    prefix, shapes, attention = layer
    if local:  # only layers with a `linear_qkv` store their own norms under the fused names
        if not attention:
            shapes = {k: v for k, v in shapes.items() if k != "mlp.linear_fc1.layer_norm_weight"}
        else:
            shapes = {k: v for k, v in shapes.items() if k != "pre_mlp_layernorm.weight"}
            shapes["mlp.linear_fc1.layer_norm_weight"] = (4,)
    stored = parameters_of({f"{prefix}{name}": shape for name, shape in shapes.items()})
    style = ModelStyle(local, grouped, fused_mla)
    live = live_parameters(stored, style, DIALECTS[dialect], tp)
    back = stored_parameters(as_tensors(live), tp, local)
    assert {(p.name, p.expert, p.shape) for p in back} == {(p.name, p.expert, p.shape) for p in stored}
    assert len(back) == len(stored)
    rows: dict[tuple[str, int | None], list[Any]] = {
        (r.parameter.name, r.parameter.expert): [] for p in live for r in p.rows
    }
    for p in live:
        at = 0
        for r in p.rows:
            rows[r.parameter.name, r.parameter.expert].append((r.start, (at, r.count)))
            at += r.count
    for stored_one in back:
        whole = ((0, stored_one.shape[0]),)
        found = tuple(cut for _, cut in sorted(rows[stored_one.name, stored_one.expert]))
        assert (stored_one.cuts or whole) == found


def back_names(shapes, tp=None, local=None):
    tensors = [FsdpTensor(n, s, {WEIGHT: Value("float32", s, (Source(n),))}) for n, s in shapes.items()]
    return [p.name for p in stored_parameters(tensors, tp, local)]


LOCAL_LAYER = {
    "decoder.layers.0.input_layernorm.weight": (4,),
    "decoder.layers.0.self_attention.linear_qkv.weight": (12, 4),
    "decoder.layers.0.pre_mlp_layernorm.weight": (4,),
}


def test_a_vision_tower_and_a_transformer_engine_model_keep_their_norms():
    vision = {f"vision_model.{name}": shape for name, shape in LOCAL_LAYER.items()}
    assert back_names(vision, local=True) == list(vision)
    fused = LOCAL_LAYER | {"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (4,)}
    del fused["decoder.layers.0.input_layernorm.weight"]
    assert back_names(fused, local=True) == list(fused)
    assert back_names(LOCAL_LAYER, local=False) == list(LOCAL_LAYER)


@pytest.mark.parametrize("local", [True, None])
def test_local_norms_are_stored_under_the_fused_names(local):
    assert back_names(LOCAL_LAYER, local=local) == [
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    ]


def test_the_inner_layers_of_a_hybrid_mtp_keep_their_live_name():
    shapes = {
        "mtp.layers.0.mtp_model_layer.layers.0.mlp.linear_fc2.weight": (4, 4),
        "mtp.layers.0.mtp_model_layer.final_norm.weight": (4,),
    }
    assert back_names(shapes) == list(shapes)


def test_a_norm_absorbed_by_the_fused_mla_projection_is_the_input_norm():
    name = "decoder.layers.0.self_attention.linear_qkv_down_proj.layer_norm_weight"
    assert back_names({name: (4,)}) == ["decoder.layers.0.input_layernorm.weight"]


FUSED_GDN = {
    "layers.0.self_attention.in_proj.weight": (28, 4),
    "layers.0.self_attention.conv1d.weight": (16, 1, 3),
    "layers.0.self_attention.A_log": (2,),
    "layers.0.self_attention.out_proj.weight": (4, 8),
}


@pytest.mark.parametrize(
    ("change", "tp", "error", "message"),
    [
        ({}, None, UsageError, "grouped by tensor-parallel rank.*pass --tp"),
        ({}, 3, MappingError, "do not divide by tensor parallel size 3"),
        ({"in_proj.weight": (30, 4)}, 1, MappingError, "has 30 rows, but its parts .* make 28"),
        ({"conv1d.weight": (15, 1, 3)}, 1, MappingError, "7 rows are left for two equal parts"),
        ({"out_proj.weight": (4,)}, 1, MappingError, "needed to cut a fused projection apart"),
    ],
)
def test_a_fused_projection_that_does_not_add_up_is_refused(change, tp, error, message):
    shapes = FUSED_GDN | {f"layers.0.self_attention.{name}": shape for name, shape in change.items()}
    with pytest.raises(error, match=message):
        back_names(shapes, tp)


@pytest.mark.parametrize(
    ("rows", "message"), [(9, None), (8, "8 rows are too few for 6 query rows and the keys")]
)
def test_a_fused_mla_projection_has_rows_for_queries_and_keys(rows, message):
    at = "decoder.layers.0.self_attention."
    shapes = {
        f"{at}linear_qkv_down_proj.weight": (rows, 4),
        f"{at}linear_q_up_proj.weight": (8, 6),
        f"{at}linear_kv_up_proj.weight": (8, 3),
    }
    if message is not None:
        with pytest.raises(MappingError, match=message):
            back_names(shapes)
        return
    tensors = [FsdpTensor(n, s, {WEIGHT: Value("float32", s, (Source(n),))}) for n, s in shapes.items()]
    assert {p.name: (p.shape, p.cuts) for p in stored_parameters(tensors, None, None)[:2]} == {
        f"{at}linear_q_down_proj.weight": ((6, 4), ((0, 6),)),
        f"{at}linear_kv_down_proj.weight": ((3, 4), ((6, 3),)),
    }


def test_two_tensors_of_one_stored_name_are_refused():
    shapes = {
        f"mtp.layers.0.{inner}.linear.weight": (2, 2) for inner in ("transformer_layer", "mtp_model_layer")
    }
    with pytest.raises(MappingError, match="would both be written as mtp"):
        back_names(shapes)
