"""Names to parameters: order, units, tensor-parallel dimensions, experts, halves."""

import random

import pytest

from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.megatron.keys import has_expert_axis, stacked_layers
from ckpt_tools.sharding.parameters import Expert, Part
from ckpt_tools.sharding.topology import Topology
from ckpt_tools.sharding.units import LiveTensor, describe, find_units, model_order, number_units
from tests.conftest import fixture_dir
from tests.synthetic_deepseek import deepseek_v3

MLA_LAYER = [
    "input_layernorm.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.kv_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.experts.linear_fc1.weight0",
    "mlp.experts.linear_fc1.weight2",
    "mlp.experts.linear_fc1.weight10",
    "mlp.experts.linear_fc2.weight0",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
]
# As the constructors of Megatron-Core 0.16.1 register them.
ORDER = [
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    *(f"decoder.layers.{n}.{name}" for n in (0, 2, 10) for name in MLA_LAYER),
    "decoder.layers.11.mixer.dt_bias",
    "decoder.layers.11.mixer.A_log",
    "decoder.layers.11.mixer.D",
    "decoder.layers.11.mixer.in_proj.layer_norm_weight",
    "decoder.layers.11.mixer.in_proj.weight",
    "decoder.layers.11.mixer.conv1d.weight",
    "decoder.layers.11.mixer.conv1d.bias",
    "decoder.layers.11.mixer.norm.weight",
    "decoder.layers.11.mixer.out_proj.weight",
    "decoder.layers.12.self_attention.linear_proj.weight",
    "decoder.layers.12.self_attention.linear_proj.bias",
    "decoder.layers.12.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.12.self_attention.linear_qkv.layer_norm_bias",
    "decoder.layers.12.self_attention.linear_qkv.weight",
    "decoder.layers.12.self_attention.linear_qkv.bias",
    "decoder.layers.12.self_attention.q_layernorm.weight",
    "decoder.layers.12.self_attention.k_layernorm.weight",
    "decoder.final_layernorm.weight",
    "mtp.layers.0.enorm.weight",
    "mtp.layers.0.hnorm.weight",
    "mtp.layers.0.eh_proj.weight",
    *(f"mtp.layers.0.transformer_layer.{name}" for name in MLA_LAYER),
    "mtp.layers.0.final_layernorm.weight",
    "output_layer.weight",
]


def test_names_come_in_the_order_of_the_module_tree():
    for seed in range(20):
        shuffled = random.Random(seed).sample(ORDER, len(ORDER))
        assert model_order(shuffled) == ORDER


def test_unknown_modules_keep_their_order_after_the_known_ones():
    names = ["zeta.weight", "alpha.b.weight", "output_layer.weight", "alpha.a", "alpha.c"]
    assert model_order(names) == [
        "output_layer.weight",
        "zeta.weight",
        "alpha.a",
        "alpha.c",
        "alpha.b.weight",
    ]


def test_units_are_layers_and_the_rest_is_the_root():
    modules = find_units(ORDER)
    assert modules == [*(f"decoder.layers.{n}" for n in (0, 2, 10, 11, 12)), "mtp.layers.0.transformer_layer"]
    owners = dict(zip(ORDER, number_units(ORDER, modules), strict=True))
    assert owners["decoder.layers.10.mlp.router.weight"] == 2
    assert owners["mtp.layers.0.transformer_layer.mlp.router.weight"] == 5
    root = [name for name, owner in owners.items() if owner is None]
    assert root == [name for name in ORDER if not any(name.startswith(m + ".") for m in modules)]


@pytest.mark.parametrize(
    ("names", "units"),
    [
        (["language_model.decoder.layers.0.a", "vision_model.decoder.layers.0.a", "vision_model.ln_pre.weight"],
         ["language_model.decoder.layers.0", "vision_model.decoder.layers.0"]),
        ([f"mtp.layers.0.mtp_model_layer.{name}" for name in ("layers.1.mixer.D", "final_norm.weight")],
         ["mtp.layers.0.mtp_model_layer.layers.1"]),
        # names like those of Megatron's own modules do not make modules of transformers units
        (["vision_model.blocks.0.mlp.linear_fc1.weight", "visual.blocks.0.attn.qkv.weight"], []),
    ],
)  # fmt: skip
def test_units_of_other_models(names, units):
    assert find_units(names) == units


def test_a_numbered_module_of_unknown_kind_is_an_error_that_names_its_tensors():
    names = ["decoder.layers.0.norm.weight", "tower.blocks.3.attn.weight"]
    with pytest.raises(UsageError, match=r"no place in any FSDP unit:\n  - tower\.blocks\.3\.attn\.weight\n"):
        find_units(names)
    assert find_units(names, units=["decoder.layers.*", "tower.blocks.*"]) == [
        "decoder.layers.0",
        "tower.blocks.3",
    ]
    assert find_units(names, root=["**.blocks.*"]) == ["decoder.layers.0"]
    assert find_units(names, units=["decoder.layers.*"], root=None) == ["decoder.layers.0"]
    with pytest.raises(UsageError, match="no module of the model has such a path"):
        find_units(names, units=["towers.*"], root=None)


def test_nested_units_belong_to_the_outermost_or_the_innermost():
    modules = ["a", "a.b", "c"]
    names = ["a.w", "a.b.w", "c.w", "d", "ab.w"]
    assert number_units(names, modules) == [0, 0, 2, None, None]
    assert number_units(names, modules, innermost=True) == [0, 1, 2, None, None]


def test_a_deepseek_model_is_described():
    tensors = deepseek_v3(layers=5)
    topology = Topology(8, tp=2, ep=4, etp=1)
    parameters = {p.name: p for p in describe(tensors, topology, tp_dims={"*_down_proj.weight": None})}
    fc1 = parameters["decoder.layers.3.mlp.experts.linear_fc1.weight17"]
    assert (fc1.tp_dim, fc1.is_expert, fc1.expert, fc1.unit) == (0, True, Expert(17, 256), 3)
    assert fc1.parts == (Part(f"{fc1.name}_w", 2048), Part(f"{fc1.name}_v", 2048))
    shared = parameters["decoder.layers.3.mlp.shared_experts.linear_fc2.weight"]
    assert (shared.tp_dim, shared.is_expert, shared.expert) == (1, False, None)
    bias = parameters["decoder.layers.3.mlp.router.expert_bias"]
    assert (bias.buffer, bias.tp_dim, bias.dtype) == (True, None, "float32")
    assert all(p.unit is None for p in describe(tensors, Topology(strategy="no_shard")))


def test_tensor_parallelism_needs_a_rule():
    tensors = [
        LiveTensor(name, (4, 4), "bfloat16") for name in ("a.weight", "layer.linear_q_down_proj.weight")
    ]
    assert [p.tp_dim for p in describe(tensors, Topology(2))] == [None, None]
    with pytest.raises(MappingError) as error:
        describe(tensors, Topology(tp=2))
    assert all(f"- {tensor.name}\n" in str(error.value) for tensor in tensors)
    dims: dict[str, int | None] = {"a.*": 1, "*down_proj*": 0}
    assert [p.tp_dim for p in describe(tensors, Topology(tp=2), tp_dims=dims)] == [1, 0]


LAYER = "decoder.layers.0."


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        (f"{LAYER}mixer.norm.weight", 0),
        (f"{LAYER}norm.weight", None),
        (f"{LAYER}mixer.D", 0),
        (f"{LAYER}mixer.conv1d_weight", 0),
        (f"{LAYER}mixer.out_proj.weight", 1),
        (f"{LAYER}self_attention.out_norm.weight", None),
        (f"{LAYER}self_attention.core_attention.softmax_offset", 0),
        (f"{LAYER}mlp.shared_experts.gate_weight", None),
        (f"{LAYER}mlp.linear_fc2.bias", None),
        (f"{LAYER}mlp.experts.linear_fc1.weight0", 0),
        (f"{LAYER}mlp.experts.linear_fc2.weight0", 1),
        (f"{LAYER}mlp.experts.linear_fc2.bias0", None),
        ("output_layer.bias", 0),
        ("multi_modal_projector.proj.weight", 0),
        (
            f"vision_model.{LAYER}mlp.linear_fc1.weight",
            0,
        ),  # of Megatron's own tower; those of transformers are whole
        ("multi_modal_projector.linear_1.weight", None),
        ("vision_model.blocks.0.mlp.linear_fc1.weight", None),
        ("vision_model.merger.linear_fc2.weight", None),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", None),
        ("visual.blocks.0.attn.qkv.weight", None),
    ],
)
def test_dimension_by_name(name, dim):
    (p,) = describe([LiveTensor(name, (8, 8), "bfloat16")], Topology(tp=2))
    assert p.tp_dim == dim


def test_nothing_is_asked_that_the_layout_does_not_need():
    strange = [LiveTensor("tower.blocks.3.experts.local_experts.7.x", (3, 4), "bfloat16")]
    assert describe(strange, Topology(tp=2), layout="even")[0].name == strange[0].name
    (plain,) = describe([LiveTensor("tower.blocks.3.x", (3, 4), "bfloat16")], Topology(2), layout="fsdp2")
    assert plain.unit is None


def test_missing_experts_and_odd_halves_are_refused():
    def tensor(name: str) -> LiveTensor:
        return LiveTensor(name, (4, 4), "bfloat16")

    names = [f"mlp.experts.local_experts.{e}.linear_fc1.weight" for e in (0, 1, 3)]
    with pytest.raises(MappingError, match=r"mlp\.experts\.\*: 3 experts, the highest number is 3"):
        describe(map(tensor, names), Topology(), units=["mlp"])
    with pytest.raises(MappingError, match=r"x: 3 rows cannot be two equal halves"):
        describe([LiveTensor("x", (3, 4), "bfloat16", gated=True)], Topology())


@pytest.mark.parametrize(
    "fixture",
    ["main_mla_mtp_moe_fr_tp2", "main_gdn_fr_tp2", "main_llava_fr_tp2", "v016_dense_fr_tp2_dp2_te"],
)
def test_dimensions_are_those_that_megatron_cut(fixture):
    """Chunks of torch_dist checkpoints trained with TP 2 show which dimension each parameter is cut along."""
    from torch.distributed.checkpoint import FileSystemReader

    entries = FileSystemReader(fixture_dir(fixture) / "checkpoint").read_metadata().state_dict_metadata
    local_mla: dict[str, int | None] = {"*_down_proj.weight": 0}
    compared = 0
    for key, entry in entries.items():
        is_weight = key.endswith((".weight", ".bias", "_weight", "_log")) and not key.startswith("optimizer")
        if not hasattr(entry, "chunks") or not is_weight:
            continue
        layers, experts = stacked_layers(key), has_expert_axis(key)
        name = f"{key[: layers[0]]}0.{key[layers[0] :]}" if layers else key
        name = name.replace(".experts.experts.", ".experts.local_experts.0.")
        axes = len(layers) + experts
        offsets = [chunk.offsets[axes:] for chunk in entry.chunks]
        cut = [d for d in range(len(offsets[0])) if len({o[d] for o in offsets}) > 1]
        (p,) = describe(
            [LiveTensor(name, tuple(entry.size[axes:]), "bfloat16")], Topology(tp=2), tp_dims=local_mla
        )
        assert cut == ([] if p.tp_dim is None else [p.tp_dim]), key
        compared += 1
    assert compared >= 9
