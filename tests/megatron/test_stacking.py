"""Stored keys taken apart into per-layer, per-expert parameters."""

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.torch_dist.stacking import layer_counts, slices_of, sort_keys
from ckpt_tools.model.catalog import Catalog, TensorEntry


def entry(key: str, *shape: int) -> TensorEntry:
    return TensorEntry(key, "bfloat16", shape, ())


def catalog(*entries: TensorEntry) -> Catalog:
    return Catalog("", {e.key: e for e in entries}, {})


def test_a_stacked_weight_is_one_parameter_per_layer():
    parts = slices_of(entry("decoder.layers.self_attention.linear_proj.weight", 3, 8, 4))
    assert [(p.name, p.lead, p.shape, p.expert) for p in parts] == [
        (f"decoder.layers.{i}.self_attention.linear_proj.weight", (i,), (8, 4), None) for i in range(3)
    ]


def test_stacked_experts_lose_both_axes():
    parts = slices_of(entry("decoder.layers.mlp.experts.experts.linear_fc1.weight", 2, 3, 8, 4))
    assert [(p.name.split(".")[2], p.lead, p.expert) for p in parts] == [
        (str(layer), (layer, expert), expert) for layer in range(2) for expert in range(3)
    ]
    assert {p.shape for p in parts} == {(8, 4)}


@pytest.mark.parametrize(
    ("key", "shape", "names"),
    [
        ("layers.a.weight", (2,), ["layers.0.a.weight", "layers.1.a.weight"]),
        ("decoder.layers.3.mtp.layers.weight", (1,), ["decoder.layers.3.mtp.layers.0.weight"]),
        ("tower.layers.experts.experts.5.fc.weight", (1, 4), ["tower.layers.0.experts.experts.fc.weight"]),
    ],
)
def test_the_layer_number_stands_behind_the_stacked_segment(key, shape, names):
    assert [p.name for p in slices_of(entry(key, *shape))] == names


def test_layer_numbers_and_experts_of_one_layer():
    (norm,) = slices_of(entry("decoder.layers.7.input_layernorm.weight", 4))
    assert (norm.name, norm.lead, norm.shape) == ("decoder.layers.7.input_layernorm.weight", (), (4,))
    parts = slices_of(entry("decoder.layers.7.mlp.experts.experts.linear_fc2.bias", 2, 4))
    assert [(p.lead, p.shape, p.expert) for p in parts] == [((0,), (4,), 0), ((1,), (4,), 1)]


def test_a_gap_in_the_layers_is_named():
    with pytest.raises(MappingError, match=r"decoder\.layers\.\*: layers \[1\] are missing below layer 2"):
        sort_keys(catalog(entry("decoder.layers.0.a.weight", 4), entry("decoder.layers.2.a.weight", 4)))


def test_adapters_are_refused_by_name():
    with pytest.raises(MappingError, match=r"layers\.0\.x\.adapter\.linear_in\.weight: adapter weights"):
        sort_keys(catalog(entry("decoder.layers.0.x.adapter.linear_in.weight", 4, 4)))


def test_stacked_axes_longer_than_the_shape_are_refused():
    with pytest.raises(MappingError, match="too short"):
        slices_of(entry("decoder.layers.mlp.experts.experts.linear_fc1.weight", 2))


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
        catalog(entry("module.decoder.layers.a.weight", 2, 4), entry("module.output_layer.weight", 4, 4))
    )
    assert [(p.name, p.key) for p in keys.parameters] == [
        ("decoder.layers.0.a.weight", "module.decoder.layers.a.weight"),
        ("decoder.layers.1.a.weight", "module.decoder.layers.a.weight"),
        ("output_layer.weight", "module.output_layer.weight"),
    ]
