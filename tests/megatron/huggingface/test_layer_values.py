"""Which layers a number or a list of config.json means, where every one of them counts."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tools.megatron.huggingface.config import codecs as values


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda c: values.read_step(2, {**c, "decoder_sparse_step": 2}), (0, 1, 0, 1, 0)),
        (lambda c: values.read_step(3, {**c, "decoder_sparse_step": 3}), (0, 0, 1, 0, 0)),
        (lambda c: values.read_dense([3], {**c, "decoder_sparse_step": 2}), (0, 1, 0, 0, 0)),
        (lambda c: values.read_dense([0, 2], c), (0, 1, 0, 1, 1)),
        (lambda c: values.read_dense(None, c), (1, 1, 1, 1, 1)),  # type: ignore[arg-type]
        (values.every_second, ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]),
        (values.every_fourth_full, ["full_attention", *["sliding_attention"] * 3, "full_attention"]),
        (values.all_sliding, ["sliding_attention"] * 5),
        (lambda c: values.read_exaone_types(None, {**c, "sliding_window": 8}), (1, 1, 1, 0, 1)),
        (lambda c: values.read_exaone_types(None, {**c, "sliding_window_pattern": 2}), (1, 0, 1, 0, 1)),
        (lambda c: values.read_exaone_types(None, {**c, "sliding_window": None}), ()),
        (lambda c: values.read_exaone_rope(None, {**c, "sliding_window": 8}), (0, 0, 0, 1, 0)),
        (lambda c: values.read_exaone_rope(["full_attention"] * 5, {**c, "sliding_window": None}), ()),
        (lambda c: values.read_leading_dense(2, c), (0, 0, 1, 1, 1)),
        (lambda c: values.read_leading_dense(7, c), (0,) * 5),
        (lambda c: values.read_mlp_types(None, {**c, "first_k_dense_replace": 0}), (1,) * 5),
        (lambda c: values.read_mlp_types(None, c), (0, 1, 1, 1, 1)),
        (lambda c: values.read_mlp_types(None, {**c, "model_type": "glm_moe_dsa"}), (0, 0, 0, 1, 1)),
        (lambda c: values.dense_by_types({**c, "mlp_layer_types": ["dense"] * 5}), 5),
        (lambda c: values.dense_by_types({**c, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}), 2),
        (lambda c: values.read_rotated([1, 0, 1, 1, 0], c), (0, 1, 0, 0, 1)),
        (lambda c: values.read_rotated(None, c), (0, 0, 0, 1, 0)),
        (lambda c: values.read_rotated(None, {**c, "no_rope_layer_interval": 2}), (0, 1, 0, 1, 0)),
    ],
)
def test_every_layer_has_its_own(found: Any, expected: object) -> None:
    assert found({"num_hidden_layers": 5}) == expected
