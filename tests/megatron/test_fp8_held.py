"""Which weights a job with `--fp8-param-gather` holds in FP8; `test_native_layouts.py` has a real job's buckets."""

from __future__ import annotations

import pytest

from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.settings import is_held_in_fp8

FP8 = {"fp8": "hybrid", "fp8_param_gather": True, "transformer_impl": "transformer_engine", "num_layers": 4}


def settings(**more: object) -> CommonState:
    return CommonState({}, "common.pt", FP8 | more)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", True),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight17", True),
        ("decoder.layers.3.mlp.shared_experts.linear_fc2.weight", True),
        ("decoder.layers.0.self_attention.in_proj.weight", True),
        ("mtp.layers.0.eh_proj.weight", True),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", False),
        ("decoder.layers.0.self_attention.linear_qkv.bias", False),
        ("decoder.layers.0.mlp.router.weight", False),
        ("decoder.layers.0.self_attention.conv1d.weight", False),
        ("embedding.word_embeddings.weight", False),
        ("output_layer.weight", False),
    ],
)
def test_linear_layers_of_transformer_engine(name: str, expected: bool) -> None:
    assert is_held_in_fp8(name, settings()) is expected
    assert not is_held_in_fp8(name, settings(fp8=None))
    assert not is_held_in_fp8(name, settings(fp8_param_gather=False))
    assert not is_held_in_fp8(name, settings(transformer_impl="local"))


def test_layers_that_stay_in_bf16() -> None:
    def held(**more: object) -> list[int]:
        common = settings(first_last_layers_bf16=True, **more)
        names = {i: f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(4)}
        return [i for i, name in names.items() if is_held_in_fp8(name, common)]

    assert held() == [1, 2]
    assert held(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=3) == [0]
