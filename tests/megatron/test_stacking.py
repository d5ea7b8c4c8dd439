"""Stored keys taken apart into per-layer, per-expert parameters."""

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.torch_dist.stacking import layer_counts, missing_layers, slices_of, sort_keys
from ckpt_tools.model.catalog import Catalog, TensorEntry


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
