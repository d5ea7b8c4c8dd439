"""GLM-4.5: attention of Qwen with a part of each head rotated, experts and prediction layers of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tools.megatron.huggingface.config.config import in_v4_form
from ckpt_tools.megatron.huggingface.families.identify import detect_family
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets
from tests.megatron.huggingface.by_rules import BASE, assert_same, directory, exported, imported, problems
from tests.megatron.huggingface.materialise import specs

GLM = {
    **BASE,
    "model_type": "glm4_moe",
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


@pytest.mark.parametrize("changes", [{}, {"attention_bias": False}, {"use_qk_norm": False}])
def test_both_ways_with_prediction_layers(changes: dict[str, Any]) -> None:
    """Names and bits come back, without a config.json as a reference too; the args say what the layers are."""
    config = {**GLM, **changes}
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    assert found.args["rotary_percent"] == 0.5 and found.args["moe_layer_freq"] == [0, 1]
    assert found.args["add_qkv_bias"] == config["attention_bias"]
    assert "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight" in megatron
    assert detect_family(megatron).name == "glm4_moe"
    made, again = exported(megatron, found.args)
    assert_same(again, tensors)
    assert {key: made.config[key] for key in config} == config


def test_copies_of_the_release() -> None:
    """Embedding and head are stored in the prediction layer too, which is told and dropped, or written back."""
    tensors = directory(GLM)
    released = {**tensors, "model.layers.2.embed_tokens.weight": tensors["model.embed_tokens.weight"],
                "model.layers.2.shared_head.head.weight": tensors["lm_head.weight"]}  # fmt: skip
    found, megatron = imported(GLM, released)
    assert sorted(found.dropped) == sorted(released.keys() - tensors.keys()) and len(found.equal) == 2
    exported = export_targets(specs(megatron), found.args, mtp_copies=True)
    assert {target.key for target in exported.tensors} == released.keys()


def test_the_rotated_part_is_read_wherever_it_stands() -> None:
    """transformers 5 keeps it with the base; the class rotates half of each head unless told, so 1 says something."""
    tensors = directory(GLM)
    told = {key: value for key, value in GLM.items() if key != "partial_rotary_factor"}
    assert imported(told, tensors)[0].args["rotary_percent"] == 0.5
    for part in (0.25, 1.0):
        rope = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": part}
        assert in_v4_form({"rope_parameters": rope})["partial_rotary_factor"] == part
        assert imported({**told, "rope_parameters": rope}, tensors)[0].args["rotary_percent"] == part


def test_what_megatron_rotates_otherwise_is_refused() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    text = problems(lambda: imported({**GLM, "rope_scaling": yarn}, directory(GLM)))
    assert "YaRN together with rotary_percent" in text
    whole = {**GLM, "rope_scaling": yarn, "partial_rotary_factor": 1.0}
    assert imported(whole, directory(GLM))[0].args["position_embedding_type"] == "yarn"
    found, megatron = imported(GLM, directory(GLM))
    for name, value in (("rotary_interleaved", True), ("moe_router_score_function", "softmax")):
        assert name in problems(lambda n=name, v=value: export_targets(specs(megatron), {**found.args, n: v}))


def test_a_model_without_a_shared_expert_is_not_of_this_class() -> None:
    found, megatron = imported(GLM, directory(GLM))
    rest = {name: array for name, array in megatron.items() if "shared_experts" not in name}
    args = {**found.args, "moe_shared_expert_intermediate_size": None}
    text = problems(lambda: export_targets(specs(rest), args))
    assert "moe_shared_expert_intermediate_size is not set" in text
