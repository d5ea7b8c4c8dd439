"""Live names, fused projections and gated halves, dialect by dialect; and live tensors back to stored parameters."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.megatron.fsdp_dtensor.parameters import (
    FsdpTensor,
    GatingChoice,
    LiveParameter,
    live_parameters,
    mark_gated,
    packed_projections,
    stored_parameters,
)
from ckpt_tools.megatron.names import DIALECTS, ModelStyle
from ckpt_tools.megatron.torch_dist.stacking import slices_of
from ckpt_tools.model.catalog import TensorEntry, Value
from ckpt_tools.model.model import Parameter
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.views import Source

TE = ModelStyle(local_norms=False, grouped_experts=True)
LOCAL = ModelStyle(local_norms=True, grouped_experts=False)
FUSED_MLA = ModelStyle(local_norms=False, grouped_experts=True, fused_mla_down=True)


def stored(shapes):
    slices = [p for key, shape in shapes.items() for p in slices_of(TensorEntry(key, "bfloat16", shape, ()))]
    return [Parameter(p.name, p.shape, p.dtype, {}, p.expert) for p in slices]


def live(shapes, style=TE, dialect="main", tp=1):
    return live_parameters(stored(shapes), style, DIALECTS[dialect], tp)


def tensors(shapes):
    return [FsdpTensor(n, s, {WEIGHT: Value("float32", s, (Source(n),))}) for n, s in shapes.items()]


def back(shapes, tp=None, local=None):
    return stored_parameters(tensors(shapes), tp, local)


LAYER = "decoder.layers.0."
OWN_NORM = f"{LAYER}input_layernorm.weight"
NORMS = {
    f"{LAYER}self_attention.linear_qkv.layer_norm_weight": (4,),
    f"{LAYER}mlp.linear_fc1.layer_norm_bias": (4,),
}
EXPERTS = {f"{LAYER}mlp.experts.experts.linear_fc1.weight": (2, 8, 4)}
GDN_PARTS = {f"{LAYER}self_attention.in_proj.weight.{part}": (rows, 3) for part, rows in
             [("query", 4), ("key", 4), ("value", 8), ("z", 8), ("beta", 2), ("alpha", 2)]}  # fmt: skip
MLA_DOWN = {
    f"{LAYER}self_attention.linear_{part}_down_proj.weight": (rows, 4) for part, rows in (("q", 6), ("kv", 5))
}
MLA_FUSED = f"{LAYER}self_attention.linear_qkv_down_proj.weight"
MAMBA_CONV = {f"{LAYER}mixer.conv1d.bias.{part}": (4,) for part in ("x", "B", "C")}
MTP = {"mtp.layers.0.transformer_layer.norm": (4,)}


@pytest.mark.parametrize(
    ("shapes", "style", "dialect", "names", "groups"),
    [
        ({**NORMS, OWN_NORM: (4,)}, TE, "main", [*NORMS, OWN_NORM], None),
        (NORMS, LOCAL, "main", [OWN_NORM, f"{LAYER}pre_mlp_layernorm.bias"], None),
        (EXPERTS, TE, "main", [f"{LAYER}mlp.experts.linear_fc1.weight{e}" for e in (0, 1)], None),
        (EXPERTS, LOCAL, "main", [f"{LAYER}mlp.experts.local_experts.{e}.linear_fc1.weight" for e in (0, 1)], None),
        *((MTP, TE, dialect, [f"mtp.layers.0.{state}.norm"], [f"mtp.layers.0.{group}.norm"])
          for dialect, state, group in (
              ("core-0.16", "transformer_layer", "transformer_layer"),
              ("core-0.17", "mtp_model_layer", "mtp_model_layer"),
              ("core-0.18", "mtp_model_layer", "mtp_model_layer"),
              ("core-0.19", "mtp_model_layer", "mtp_model_layer"),
              ("main", "transformer_layer", "mtp_model_layer"),
              ("bridge", "mtp_model_layer", "mtp_model_layer"))),
        (GDN_PARTS, TE, "bridge", list(GDN_PARTS), [f"{LAYER}self_attention.in_proj.weight"] * 6),
        (MAMBA_CONV, TE, "main", [f"{LAYER}mixer.conv1d_bias"], None),
        (MAMBA_CONV, TE, "core-0.19", [f"{LAYER}mixer.conv1d.bias"], None),
        (MLA_DOWN, FUSED_MLA, "main", list(MLA_DOWN), [MLA_FUSED] * 2),
        (MLA_DOWN, FUSED_MLA, "core-0.19", [MLA_FUSED], None),
    ],
)  # fmt: skip
def test_names_in_states_and_in_groups(shapes, style, dialect, names, groups):
    found = live(shapes, style, dialect, tp=2)
    assert [p.name for p in found] == names
    assert [p.group_name for p in found] == (groups or names)


def test_what_is_cut_otherwise_and_what_is_not_whole_is_refused():
    with pytest.raises(MappingError, match="tensor parallel size 3 does not divide"):
        live(GDN_PARTS, tp=3)
    with pytest.raises(MappingError, match="do not make a whole fused projection"):
        live({key: shape for key, shape in GDN_PARTS.items() if not key.endswith("beta")})


# As sharded_state_dict splits them: gated_delta_net/{gdn,gdn2,common}.py, mamba_mixer.py. Parts of different sizes.
PACKED: list[tuple[str, tuple[tuple[str, int], ...]]] = [
    ("self_attention.in_proj.weight",
     (("query", 4), ("key", 6), ("value", 8), ("z", 10), ("beta", 2), ("alpha", 12))),
    ("self_attention.in_proj.weight",
     (("query", 4), ("key", 6), ("value", 8), ("z", 10), ("f", 2), ("b", 12), ("w", 14))),
    ("self_attention.conv1d.weight", (("query", 4), ("key", 6), ("value", 8))),
    ("mixer.in_proj.weight", (("z", 8), ("x", 10), ("B", 4), ("C", 6), ("dt", 2))),
    ("mixer.conv1d.weight", (("x", 10), ("B", 4), ("C", 6))),
    ("mixer.conv1d.bias", (("x", 10), ("B", 4), ("C", 6))),
]  # fmt: skip
# The same on every rank: gate before up whatever the order they are stored in, and MLA's down-projections.
WHOLE = [
    (f"mlp.linear_fc1.weight{expert}", ((f"weight_w{expert}", 4), (f"weight_v{expert}", 4)))
    for expert in ("", "3")
]


@pytest.mark.parametrize("stored_order", [1, -1])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("name", "parts"), [*PACKED, *WHOLE])
def test_rows_of_a_fused_tensor_are_those_that_the_ranks_hold(name, parts, tp, stored_order):
    """Against whole arrays: every rank's slice of every part, as it is in the rank's own projection."""
    base, is_packed = f"{LAYER}{name}", (name, parts) in PACKED
    head = f"{base}." if is_packed else base.rpartition("weight")[0]
    dialect = (
        "bridge" if "mixer" in name else "main"
    )  # one of Mamba's parts is called as one of a gated delta net's
    (found,) = live({f"{head}{part}": (rows, 3) for part, rows in parts[::stored_order]}, TE, dialect, tp)
    values = {part: [f"{part}{row}" for row in range(rows)] for part, rows in parts}
    ranks = tp if is_packed else 1
    expected = [
        row
        for rank in range(ranks)
        for part, rows in parts
        for row in values[part][rank * rows // ranks : (rank + 1) * rows // ranks]
    ]
    packed = []
    for rows in found.rows:
        part = rows.parameter.name.removeprefix(head)
        packed += values[part][rows.start : rows.start + rows.count]
    assert (found.name, len(packed), packed) == (base, found.shape[0], expected)
    assert found.is_packed is is_packed


def test_what_is_not_packed():
    assert not any(p.is_packed for p in live(GDN_PARTS, dialect="bridge"))
    (down,) = live(MLA_DOWN, FUSED_MLA, "bridge", tp=2)
    assert ([(r.start, r.count) for r in down.rows], down.shape, down.is_packed) == (
        [(0, 6), (0, 5)],
        (11, 4),
        False,
    )


def test_packed_projections_are_known_by_their_names():
    names = [
        *(f"decoder.layers.0.self_attention.{n}" for n in ("A_log", "in_proj.weight", "conv1d.weight")),
        "decoder.layers.0.self_attention.in_proj.layer_norm_weight",
        *(f"decoder.layers.1.mixer.{n}" for n in ("A_log", "in_proj.weight", "conv1d_weight", "conv1d_bias")),
        "decoder.layers.2.self_attention.in_proj.weight",  # of an attention: nothing is packed
        *(f"decoder.layers.3.self_attention.{n}" for n in ("A_log", "in_proj.weight.query")),
    ]
    assert packed_projections(names) == tuple(names[i] for i in (1, 2, 5, 6, 7))


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


def in_parts(name: str, *rest: int, **parts: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}": (rows, *rest) for part, rows in parts.items()}


GDN = {
    "self_attention.in_proj.layer_norm_weight": (4,),
    **in_parts("self_attention.in_proj.weight", 4, query=4, key=4, value=8, z=8, beta=2, alpha=2),
    **in_parts("self_attention.conv1d.weight", 1, 3, query=4, key=4, value=8),
    "self_attention.A_log": (2,),
    "self_attention.dt_bias": (2,),
    "self_attention.out_norm.weight": (4,),
    "self_attention.out_proj.weight": (4, 8),
}
GDN2 = {name: shape for name, shape in GDN.items() if not name.endswith((".beta", ".alpha", ".dt_bias"))} | {
    **in_parts("self_attention.in_proj.weight", 4, f=4, b=4, w=8),
    "self_attention.dt_bias": (4,),
}
MAMBA = {
    **in_parts("mixer.in_proj.weight", 4, z=8, x=8, B=4, C=4, dt=2),
    **in_parts("mixer.conv1d.weight", 1, 3, x=8, B=4, C=4),
    **in_parts("mixer.conv1d.bias", x=8, B=4, C=4),
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


@given(
    st.sampled_from([ATTENTION, MLA, GDN, GDN2, MAMBA]),
    st.sampled_from([DENSE, MOE]),
    st.sampled_from(PREFIXES),
    st.sampled_from(sorted(DIALECTS)),
    st.builds(ModelStyle, st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from([1, 2]),
)
def test_stored_parameters_undo_live_ones(mixer, mlp, prefix, dialect, style, tp):
    shapes = {**mixer, **mlp}
    if (
        style.local_norms and mixer is ATTENTION
    ):  # such layers alone store their own norms under the fused names
        shapes["mlp.linear_fc1.layer_norm_weight"] = (4,)
    elif mlp is MOE or mixer is MLA:
        shapes["pre_mlp_layernorm.weight"] = (4,)
    if style.local_norms and mixer is not ATTENTION:
        shapes.pop("mlp.linear_fc1.layer_norm_weight", None)
    before = stored({f"{prefix}{name}": shape for name, shape in shapes.items()})
    found = live_parameters(before, style, DIALECTS[dialect], tp)
    after = stored_parameters(tensors({p.name: p.shape for p in found}), tp, style.local_norms)
    assert {(p.name, p.expert, p.shape) for p in after} == {(p.name, p.expert, p.shape) for p in before}
    assert len(after) == len(before)
    rows: dict[tuple[str, int | None], list[Any]] = {}
    for p in found:
        at = 0
        for r in p.rows:
            rows.setdefault((r.parameter.name, r.parameter.expert), []).append((r.start, (at, r.count)))
            at += r.count
    for one in after:
        whole = ((0, one.shape[0]),)
        assert (one.cuts or whole) == tuple(cut for _, cut in sorted(rows[one.name, one.expert]))


LOCAL_LAYER = {
    f"{LAYER}input_layernorm.weight": (4,),
    f"{LAYER}self_attention.linear_qkv.weight": (12, 4),
    f"{LAYER}pre_mlp_layernorm.weight": (4,),
}
VISION = {f"vision_model.{name}": shape for name, shape in LOCAL_LAYER.items()}
TE_LAYER = {f"{LAYER}self_attention.linear_qkv.layer_norm_weight": (4,), **LOCAL_LAYER}
del TE_LAYER[f"{LAYER}input_layernorm.weight"]
AS_FUSED = [
    f"{LAYER}self_attention.linear_qkv.layer_norm_weight",
    f"{LAYER}self_attention.linear_qkv.weight",
    f"{LAYER}mlp.linear_fc1.layer_norm_weight",
]
HYBRID_MTP = {f"mtp.layers.0.mtp_model_layer.{name}": (4, 4) for name in ("layers.0.fc", "final_norm.weight")}


@pytest.mark.parametrize(
    ("shapes", "local", "names"),
    [
        (VISION, True, list(VISION)),
        (TE_LAYER, True, list(TE_LAYER)),
        (LOCAL_LAYER, False, list(LOCAL_LAYER)),
        (LOCAL_LAYER, True, AS_FUSED),
        (LOCAL_LAYER, None, AS_FUSED),
        (HYBRID_MTP, None, list(HYBRID_MTP)),  # the inner layers of such a layer keep their live name
        ({MLA_FUSED.replace("proj.", "proj.layer_norm_"): (4,)}, None, [f"{LAYER}input_layernorm.weight"]),
    ],
)
def test_stored_names(shapes, local, names):
    assert [p.name for p in back(shapes, local=local)] == names


FUSED_GDN = {"in_proj.weight": (28, 4), "conv1d.weight": (16, 1, 3), "A_log": (2,), "out_proj.weight": (4, 8)}


@pytest.mark.parametrize(
    ("change", "tp", "error", "message"),
    [
        ({}, None, UsageError, "grouped by tensor-parallel rank.*pass --tp"),
        ({}, 3, MappingError, "tensor parallel size 3 does not divide"),
        ({"in_proj.weight": (30, 4)}, 1, MappingError, "has 30 rows, but its parts .* make 28"),
        ({"conv1d.weight": (15, 1, 3)}, 1, MappingError, "7 rows are left for two equal parts"),
        ({"out_proj.weight": (4,)}, 1, MappingError, "needed to cut a fused projection apart"),
    ],
)
def test_a_fused_projection_that_does_not_add_up_is_refused(change, tp, error, message):
    with pytest.raises(error, match=message):
        back({f"{LAYER}self_attention.{name}": shape for name, shape in (FUSED_GDN | change).items()}, tp)


def test_a_fused_mla_projection_has_rows_for_queries_and_keys():
    up = {f"{LAYER}self_attention.linear_{n}_up_proj.weight": (8, rows) for n, rows in (("q", 6), ("kv", 3))}
    with pytest.raises(MappingError, match="8 rows are too few for 6 query rows and the keys"):
        back({MLA_FUSED: (8, 4), **up})
    parts = [(p.name, p.shape, p.cuts) for p in back({MLA_FUSED: (9, 4), **up})[:2]]
    assert parts == list(zip(MLA_DOWN, ((6, 4), (3, 4)), (((0, 6),), ((6, 3),)), strict=True))


def test_two_tensors_of_one_stored_name_are_refused():
    with pytest.raises(MappingError, match="would both be written as mtp"):
        back({f"mtp.layers.0.{inner}.x.weight": (2, 2) for inner in ("transformer_layer", "mtp_model_layer")})


# ---- which fc1 weights are written in halves: shapes, args and flags must agree

FC1 = ("language.decoder.layers.0.mlp.linear_fc1.weight", "language.decoder.layers.0.mlp.linear_fc1.bias")
TOWERS = {
    FC1[0]: (16, 4),
    FC1[1]: (16,),
    "language.decoder.layers.0.mlp.linear_fc2.weight": (4, 8),
    "vision.decoder.layers.0.mlp.linear_fc1.weight": (8, 4),
    "vision.decoder.layers.0.mlp.linear_fc2.weight": (4, 8),
}
GROUPED = {f"mlp.experts.linear_fc{fc}.weight{e}": (16 // fc**2, 4 * fc) for fc in (1, 2) for e in (0, 11)}


@pytest.mark.parametrize(
    ("shapes", "choice", "expected"),
    [
        (TOWERS, GatingChoice(swiglu=True), FC1),
        (TOWERS, GatingChoice(swiglu=False), ()),  # a gate with another activation
        (TOWERS, GatingChoice(None, modules=("language",)), FC1),
        (GROUPED, GatingChoice(swiglu=True), tuple(GROUPED)[:2]),
        (
            TOWERS,
            GatingChoice(True, modules=("language", "vision")),
            r"vision\.decoder\.layers\.0\.mlp is not gated",
        ),
        (
            TOWERS,
            GatingChoice(True, modules=("audio",)),
            r"language\.decoder\.layers\.0\.mlp is gated .* leaves out",
        ),
        (TOWERS, GatingChoice(None), "neither args nor run_config.yaml"),
        (
            TOWERS,
            GatingChoice(True, wanted=False),
            "--no-swiglu was given, but the checkpoint's own settings say",
        ),
        (
            TOWERS,
            GatingChoice(False, wanted=True),
            "--swiglu was given, but the checkpoint's own settings say",
        ),
        (TOWERS, GatingChoice(True, wanted=True), "vision.decoder.layers.0.mlp is not gated by its shape"),
        (
            {"a.linear_fc1.weight": (15, 4), "a.linear_fc2.weight": (4, 8)},
            GatingChoice(True),
            "15 rows.* 8 or 16",
        ),
    ],
)
def test_which_weights_are_in_halves(shapes, choice, expected):
    parameters = [LiveParameter(name, name, shape, ()) for name, shape in shapes.items()]
    if isinstance(expected, str):
        with pytest.raises(MappingError, match=expected):
            mark_gated(parameters, choice)
    else:
        assert tuple(p.name for p in mark_gated(parameters, choice) if p.gated) == expected
