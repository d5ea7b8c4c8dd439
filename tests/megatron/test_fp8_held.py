"""Which weights a job with `--fp8-param-gather` holds in FP8; `test_native_layouts.py` has a real job's buckets."""

import pytest

from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.settings import is_held_in_fp8

FP8 = {"fp8": "hybrid", "fp8_param_gather": True, "transformer_impl": "transformer_engine", "num_layers": 4}
LAYER = "decoder.layers.0."
IN_FP8 = [*(f"{LAYER}{name}.weight" for name in ("self_attention.linear_qkv", "self_attention.in_proj",
                                                "mlp.shared_experts.linear_fc2")),
          f"{LAYER}mlp.experts.linear_fc1.weight17", "mtp.layers.0.eh_proj.weight"]  # fmt: skip
NOT = [*(f"{LAYER}{name}" for name in ("self_attention.linear_qkv.layer_norm_weight",
                                       "self_attention.linear_qkv.bias", "mlp.router.weight",
                                       "self_attention.conv1d.weight")),
       "embedding.word_embeddings.weight", "output_layer.weight"]  # fmt: skip


@pytest.mark.parametrize("name", [*IN_FP8, *NOT])
@pytest.mark.parametrize(
    "change", [{}, {"fp8": None}, {"fp8_param_gather": False}, {"transformer_impl": "local"}]
)
def test_linear_layers_of_transformer_engine(name, change):
    assert is_held_in_fp8(name, CommonState({}, "common.pt", FP8 | change)) is (name in IN_FP8 and not change)


@pytest.mark.parametrize(
    ("more", "expected"),
    [({}, [1, 2]), ({"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 3}, [0])],
)
def test_layers_that_stay_in_bf16(more, expected):
    common = CommonState({}, "common.pt", FP8 | {"first_last_layers_bf16": True} | more)
    held = [i for i in range(4) if is_held_in_fp8(f"decoder.layers.{i}.mlp.linear_fc2.weight", common)]
    assert held == expected
