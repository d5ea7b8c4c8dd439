"""Families with experts: config.json of released models (shrunk) both ways, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tools.megatron.huggingface.config.config import in_v4_form
from ckpt_tools.megatron.huggingface.config.layer_patterns import indexer_layers, sharing
from ckpt_tools.megatron.huggingface.config.megatron_args import TOO_OLD, read_model_args
from ckpt_tools.megatron.huggingface.families.identify import detect_family, family_of_config
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets
from ckpt_tools.megatron.huggingface.quantization.block_fp8 import LINEAR
from tests.megatron.huggingface.by_rules import BASE, assert_same, directory, exported, imported, problems
from tests.megatron.huggingface.materialise import specs

SIZE = {
    "vocab_size": 11,
    "hidden_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 10,
    "moe_intermediate_size": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}
LATENT = {
    **SIZE,
    "num_key_value_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "attention_bias": False,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "ep_size": 1,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
GROUPED = {**SIZE, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6}
INDEX = {"index_topk": 3, "index_head_dim": 6, "index_n_heads": 3}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32, "beta_slow": 1}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "DeepSeek-V3.2": {**LATENT, **INDEX, "model_type": "deepseek_v32", "first_k_dense_replace": 2, "n_group": 2,
                      "topk_group": 1, "rope_theta": 10000, "rope_scaling": YARN},
    "GLM-5": {**LATENT, **INDEX, "model_type": "glm_moe_dsa", "first_k_dense_replace": 3, "n_group": 1,
              "topk_group": 1, "head_dim": 2, "qk_head_dim": 6, "rope_interleave": True, "pretraining_tp": 1,
              "indexer_rope_interleave": True, "rms_norm_eps": 1e-5,
              "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "dtype": "bfloat16",
              "mlp_layer_types": ["dense", "dense", "dense", "sparse"],
              "layer_types": ["deepseek_sparse_attention"] * 4},
    "GLM-5.2": {**LATENT, **INDEX, "model_type": "glm_moe_dsa", "first_k_dense_replace": 1, "num_hidden_layers": 8,
                "indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full", "shared"],
                "index_topk_freq": 4, "index_skip_topk_offset": 3, "indexer_rope_interleave": True,
                "index_share_for_mtp_iteration": True, "moe_router_dtype": "float32"},
    "GLM-4.7-Flash": {**LATENT, "model_type": "glm4_moe_lite", "first_k_dense_replace": 1, "n_group": 1,
                      "topk_group": 1, "partial_rotary_factor": 1.0, "rope_scaling": None, "rope_theta": 1000000,
                      "routed_scaling_factor": 1.8, "dtype": "bfloat16"},
    "Moonlight": {**LATENT, "model_type": "deepseek_v3", "q_lora_rank": None, "first_k_dense_replace": 1,
                  "n_group": 1, "topk_group": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "rope_theta": 50000.0,
                  "rope_scaling": None, "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0},
    "dots.llm1": {**GROUPED, "model_type": "dots1", "first_k_dense_replace": 1, "n_routed_experts": 4,
                  "n_shared_experts": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_theta": 10000000,
                  "scoring_func": "sigmoid", "attention_bias": False, "rms_norm_eps": 1e-5, "n_group": None,
                  "topk_group": None, "sliding_window": None},
    "MiniMax-M2": {**{k: v for k, v in GROUPED.items() if k != "moe_intermediate_size"}, "model_type": "minimax_m2",
                   "attn_type_list": [1, 1, 1, 1], "auto_map": {"AutoConfig": "configuration_minimax_m2.Config"},
                   "mtp_transformer_layers": 1, "num_local_experts": 4, "num_mtp_modules": 3,
                   "qk_norm_type": "per_layer", "rope_theta": 5000000, "rotary_dim": 2, "scoring_func": "sigmoid",
                   "shared_intermediate_size": 0, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True},
    "OLMoE": {**{k: v for k, v in GROUPED.items() if k not in ("moe_intermediate_size", "head_dim")},
              "model_type": "olmoe", "num_key_value_heads": 4, "num_experts": 3, "norm_topk_prob": False,
              "attention_bias": False, "clip_qkv": None, "rope_theta": 10000.0},
    "K-EXAONE": {**GROUPED, "model_type": "exaone_moe", "first_last_k_dense_replace": 1, "num_experts": 4,
                 "is_moe_layer": [False, True, True, True], "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
                 "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
                 "sliding_window": 4, "sliding_window_pattern": "LLLG", "rope_theta": 1000000, "rope_scaling": None,
                 "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "dtype": "bfloat16",
                 "num_nextn_predict_layers": 1},
    "Hy3": {**GROUPED, "model_type": "hy_v3", "qk_norm": True, "first_k_dense_replace": 1, "num_experts": 4,
            "num_shared_experts": 1, "expert_hidden_dim": 6, "router_scaling_factor": 2.826,
            "num_nextn_predict_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0}},
    "Solar-Open": {**GROUPED, "model_type": "solar_open", "partial_rotary_factor": 1.0, "n_routed_experts": 4,
                   "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rope_theta": 1000000,
                   "first_k_dense_replace": 0, "rope_scaling": {"type": "yarn", "factor": 2.0,
                                                                "original_max_position_embeddings": 16}},
    "sarvam": {**GROUPED, "model_type": "sarvam_moe", "num_experts": 4, "num_shared_experts": 1,
               "use_qkv_bias": False, "first_k_dense_replace": 1, "use_qk_norm": True, "rope_theta": 8000000.0,
               "norm_topk_prob": True},
    "sarvam-105b": {**{k: v for k, v in LATENT.items() if not k.startswith("n_")}, "model_type": "sarvam_mla",
                    "q_lora_rank": None, "head_dim": 10, "q_head_dim": 6, "num_experts": 4, "num_shared_experts": 1,
                    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
                    "rope_scaling": {**YARN, "type": "deepseek_yarn"}},
    "Ling-2.0": {**GROUPED, "model_type": "bailing_moe_v2", "architectures": ["BailingMoeV2ForCausalLM"],
                 "num_experts": 4, "num_shared_experts": 1, "n_group": 2, "topk_group": 1, "use_qkv_bias": True,
                 "use_bias": False, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "rope_theta": 600000,
                 "use_qk_norm": True, "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 1},
}  # fmt: skip
TOLD_BY_NAMES = {
    "deepseek_v32",
    "glm_moe_dsa",
    "deepseek_v3",
    "minimax_m2",
}  # the others are like one of these


@pytest.mark.parametrize("name", RELEASED)
def test_both_ways(name: str) -> None:
    """Names, bits and every field come back; nothing that the config says is unknown."""
    config = RELEASED[name]
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    assert not any("not known" in note for note in found.notes), found.notes
    told = detect_family(megatron, read_model_args(found.args)).name == config["model_type"]
    assert told == (config["model_type"] in TOLD_BY_NAMES)
    for reference in (config, None) if told else (config,):
        made, again = exported(megatron, found.args, reference)
        assert_same(again, tensors)
    written = {field.hf for field in found.family.fields} - {"torch_dtype", "rope_scaling"}
    same = {
        key for key in written if None not in (config.get(key), made.config[key])
    }  # the class knows the rest
    assert {key: made.config[key] for key in same} == {key: config[key] for key in same}


def exported_with(name: str, **args: Any) -> str:
    """What is wrong when a model has other args."""
    config = RELEASED[name]
    found, megatron = imported(config, directory(config))
    reference = None if config["model_type"] in TOLD_BY_NAMES else config
    return problems(lambda: export_targets(specs(megatron), {**found.args, **args}, reference))


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [("DeepSeek-V3.2", {"indexer_rope_interleave": True}, "indexer_rope_interleave is True"),
     ("DeepSeek-V3.2", {"rope_interleave": False}, "rope_interleave is False"),
     ("DeepSeek-V3.2", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "attention has no 'linear' scaling"),
     ("DeepSeek-V3.2", {"rope_scaling": {**YARN, "mscale": None}}, "mscale None with mscale_all"),
     ("DeepSeek-V3.2", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": None}},
      "mscale 0.7 with mscale_all_dim None: "),
     ("sarvam-105b", {"rope_scaling": {**YARN, "mscale": 0, "mscale_all_dim": 0}},
      "mscale 0 with mscale_all_dim 0: "),
     ("Solar-Open", {"rope_scaling": {**YARN, "factor": None}}, "'yarn' scaling without a factor"),
     ("Moonlight", {"topk_group": 0}, "of 0 groups no expert can be chosen"),
     ("DeepSeek-V3.2", {"layer_types": ["full_attention"] * 4}, "expected indexed_attention or"),
     ("DeepSeek-V3.2", {"mlp_layer_types": ["dense"] * 4}, "another field disagree"),
     ("GLM-5", {"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
     ("GLM-5", {"indexer_types": ["shared", "full", "full", "full"]}, "no choice before it"),
     ("GLM-5", {"index_topk_freq": 2, "index_skip_topk_offset": 0}, "no choice before it"),
     ("GLM-5", {"indexer_types": ["full", "half", "full", "full"]}, "expected shared or full"),
     ("GLM-5", {"mlp_layer_types": ["dense"]}, "expected dense or sparse for each of 4 layers"),
     ("GLM-5", {"mlp_layer_types": [[]] * 4}, "expected dense or sparse for each of 4 layers"),
     ("GLM-5.2", {"index_skip_topk_offset": 1, "indexer_types": None, "num_nextn_predict_layers": 2},
      "Megatron counts them from 1 again"),
     ("GLM-4.7-Flash", {"head_dim": 4}, "head_dim is 4: transformers takes it for qk_rope_head_dim"),
     ("GLM-4.7-Flash", {"n_shared_experts": None}, "shared_experts.up_proj.weight: no rule"),
     ("dots.llm1", {"sliding_window": 4, "max_window_layers": 2}, "4 on some layers"),
     ("dots.llm1", {"sliding_window": 4, "layer_types": ["sliding_attention"] * 4}, "4 on some layers"),
     ("dots.llm1", {"attention_bias": True}, "attention_bias is True"),
     ("dots.llm1", {"norm_topk_prob": False}, "norm_topk_prob: Megatron computes as with True"),
     ("MiniMax-M2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
     ("MiniMax-M2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list is"),
     ("MiniMax-M2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
     ("MiniMax-M2", {"num_experts_per_tok": 1}, "weight 1"),
     ("MiniMax-M2", {"partial_rotary_factor": 0.25}, "another field disagree"),
     ("OLMoE", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
     ("OLMoE", {"sliding_window": 4}, "sliding_window is 4"),
     ("K-EXAONE", {"sliding_window": None}, "without a window"),
     ("K-EXAONE", {"sliding_window": 0}, "without a window"),
     ("K-EXAONE", {"layer_types": [[]] * 4}, "expected full_attention or sliding_attention for each of 4 layers"),
     ("K-EXAONE", {"is_moe_layer": [True] * 4}, "is_moe_layer says"),
     ("K-EXAONE", {"layer_types": None}, "sliding_window_pattern 'LLLG' without layer_types"),
     ("Hy3", {"expert_hidden_dim": 8}, "another field disagree"),
     ("Hy3", {"qk_norm": False}, "qk_norm is False"),
     ("Solar-Open", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1"),
     ("sarvam", {"n_routed_experts": 8}, "two names of one setting"),
     ("Ling-2.0", {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe"}, "architectures is"),
     ("Ling-2.0", {"use_bias": True}, "use_bias is True")],
)  # fmt: skip
def test_what_megatron_does_not_compute_is_refused(name: str, changes: dict[str, Any], text: str) -> None:
    config = RELEASED[name]
    assert text in problems(lambda: imported({**config, **changes}, directory(config)))


@pytest.mark.parametrize("terms", [(1.0, 1.0), (0.7, 0.7), (None, None), (1.0, None), (None, 0), (0.7, 0.3)])
def test_terms_of_yarn_that_all_read_alike(terms: tuple[float | None, float | None]) -> None:
    config = {
        **RELEASED["Moonlight"],
        "rope_scaling": {**YARN, "mscale": terms[0], "mscale_all_dim": terms[1]},
    }
    args = imported(config, directory(config))[0].args
    assert (args["mscale"], args["mscale_all_dim"]) == (
        1.0 if terms[0] is None else terms[0],
        terms[1] or 0.0,
    )


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [("DeepSeek-V3.2", {"dsa_indexer_rope_interleaved": None}, TOO_OLD),
     ("DeepSeek-V3.2", {"dsa_indexer_k_norm_epsilon": 1e-5}, "dsa_indexer_k_norm_epsilon is 1e-05"),
     ("DeepSeek-V3.2", {"dsa_indexer_scoring_relu": False}, "dsa_indexer_scoring_relu is False"),
     ("DeepSeek-V3.2", {"dsa_indexer_topk_freq": 2}, "indexer_layers is (1, 0, 1, 0)"),
     ("DeepSeek-V3.2", {"experimental_attention_variant": None}, "demands 'dsa'"),
     ("DeepSeek-V3.2", {"mscale": 0.7, "mscale_all_dim": 0.0}, "mscale 0.7 with mscale_all_dim 0.0: transformers"),
     ("Moonlight", {"experimental_attention_variant": "dsa"}, "layers with another kind of attention"),
     ("MiniMax-M2", {"moe_router_score_function": "softmax"}, "moe_router_score_function is 'softmax'"),
     ("MiniMax-M2", {"moe_router_topk": 1}, "gives a single expert the weight 1"),
     ("MiniMax-M2", {"rotary_percent": 0.3}, "rotary_percent 0.3 of 4 is not a whole number"),
     ("OLMoE", {"num_query_groups": 2, "group_query_attention": True}, "num_key_value_heads"),
     ("K-EXAONE", {"no_rope_freq": [0, 0, 1, 1]}, "layer_types: the checkpoint has (0, 0, 1, 1)"),
     ("K-EXAONE", {"window_size": None}, "sliding_window"),
     ("dots.llm1", {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is False")],
)  # fmt: skip
def test_a_checkpoint_that_is_not_of_the_class_is_refused(name: str, args: dict[str, Any], text: str) -> None:
    assert text in exported_with(name, **args)


@pytest.mark.parametrize(
    ("name", "groups"),
    [("DeepSeek-V3.2", (8, 4)), ("Moonlight", (8, 4)), ("Ling-2.0", (8, 4)), ("GLM-5", (None, None))],
)
def test_groups_of_experts_where_none_are_told(name: str, groups: tuple[int | None, int | None]) -> None:
    """They are the class's own; one group is none, and one of eight is a choice."""
    config = {key: value for key, value in RELEASED[name].items() if key not in ("n_group", "topk_group")}
    tensors = directory(config)

    def read(**changes: Any) -> tuple[Any, Any]:
        args = imported({**config, **changes}, tensors)[0].args
        return args["moe_router_num_groups"], args["moe_router_group_topk"]

    assert read() == groups
    assert read(n_group=1, topk_group=1) == read(n_group=None) == (None, None)
    assert read(topk_group=1) == ((8, 1) if groups[0] else (None, None))


def test_bridge_says_the_windows_again() -> None:
    """Its K-EXAONE has them layer by layer too: the same is taken, another pattern is refused."""
    config = RELEASED["K-EXAONE"]
    found, megatron = imported(config, directory(config))
    bridge = {"layer_types": config["layer_types"], "sliding_windows": [4, 4, 4, 0], "swiglu_limits": None,
              "mtp_layer_types": ["full_attention"], "mtp_sliding_windows": [0]}  # fmt: skip
    exported = export_targets(specs(megatron), {**found.args, **bridge}, config)
    assert {one.key for one in exported.tensors} == directory(config).keys()
    for name, other in (("layer_types", ["full_attention"] * 4), ("sliding_windows", [4, 4, 8, 0]),
                        ("mtp_layer_types", ["sliding_attention"]), ("mtp_sliding_windows", [4])):  # fmt: skip
        assert f"{name} is " in exported_with("K-EXAONE", **{**bridge, name: other})


def test_the_prediction_layer_of_k_exaone_is_dense() -> None:
    """Beside the model, and without experts though the last layer has some; only Bridge builds it so."""
    config = RELEASED["K-EXAONE"]
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    gate, up = (tensors[f"mtp.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    fc1 = megatron["mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"]
    assert fc1.tobytes() == gate.tobytes() + up.tobytes()
    assert not [name for name in megatron if name.startswith("mtp.") and "expert" in name]
    assert any(
        "prediction module is dense, as only Megatron-Bridge builds it" in note for note in found.notes
    )
    bare = {name: array for name, array in tensors.items() if not name.startswith("mtp.")}
    found, _ = imported(config, bare)
    assert found.args["mtp_num_layers"] is None and not [note for note in found.notes if "is dense" in note]
    assert "has names for one" in exported_with("K-EXAONE", mtp_num_layers=2)


def test_the_indexer_is_quantized_as_the_release_is() -> None:
    """Queries and keys of the indexer are codes; the linear that weighs its heads is not."""
    config = RELEASED["DeepSeek-V3.2"]
    tensors = [key for key in directory(config) if ".0.self_attn." in key]
    assert {key.removeprefix("model.layers.0.self_attn.") for key in tensors if LINEAR.search(key)} == {
        "q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight", "o_proj.weight",
        "indexer.wq_b.weight", "indexer.wk.weight",
    }  # fmt: skip


def test_norms_over_heads_are_told_from_norms_of_one() -> None:
    """A model with the names of OLMoE or MiniMax, and norms as wide as a head, is neither."""
    config = RELEASED["MiniMax-M2"]
    found, megatron = imported(config, directory(config))
    assert megatron["decoder.layers.0.self_attention.q_layernorm.weight"].shape == (16,)
    assert megatron["decoder.layers.0.self_attention.k_layernorm.weight"].shape == (8,)
    narrow = {name: array[:4] if "_layernorm.weight" in name and "self_att" in name else array
              for name, array in megatron.items()}  # fmt: skip
    text = problems(lambda: export_targets(specs(narrow), found.args))
    assert "q_layernorm.weight has shape [4], its settings ask for [16]" in text


def test_the_rotation_of_the_indexer_tells_the_family() -> None:
    config = RELEASED["DeepSeek-V3.2"]
    found, megatron = imported(config, directory(config))
    args = {**found.args, "dsa_indexer_rope_interleaved": True}
    assert export_targets(specs(megatron), args).family.name == "glm_moe_dsa"
    text = problems(lambda: export_targets(specs(megatron), args, config))
    assert "dsa_indexer_rope_interleaved is True; DeepseekV32ForCausalLM is False" in text


def test_norms_of_sparse_attention_are_read_where_they_are_fused() -> None:
    config = RELEASED["DeepSeek-V3.2"]
    found, megatron = imported(config, directory(config))
    assert "decoder.layers.0.self_attention.q_layernorm.weight" in megatron
    fused = {name.replace("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"): array
             for name, array in megatron.items()}  # fmt: skip
    assert len(fused) == len(megatron) and fused.keys() != megatron.keys()
    names = {one.key for one in export_targets(specs(fused), found.args).tensors}
    assert names == directory(config).keys()


def test_only_some_layers_have_an_indexer() -> None:
    config = RELEASED["GLM-5.2"]
    tensors = directory(config)
    found, _ = imported(config, tensors)
    having = {int(key.split(".")[2]) for key in tensors if ".indexer." in key}
    assert having == {0, 1, 2, 6, 8}  # the last is the prediction layer
    assert (found.args["dsa_indexer_topk_freq"], found.args["dsa_indexer_skip_topk_offset"]) == (4, 3)
    numbers = {key: value for key, value in config.items() if key != "indexer_types"}
    assert imported(numbers, tensors)[0].args == found.args
    letters = {**numbers, "index_topk_pattern": "FFFSSSFS", "index_topk_freq": 1}
    assert imported(letters, tensors)[0].args == found.args


@pytest.mark.parametrize("freq", [1, 2, 3, 4])
@pytest.mark.parametrize("offset", [0, 1, 2, 5])
def test_a_pattern_gives_its_numbers(freq: int, offset: int) -> None:
    pattern = indexer_layers(11, freq, offset)
    assert sharing(pattern or (1,) * 11) == ((freq, max(offset, 1)) if freq > 1 else (1, 0))
    assert "every n-th layer" in problems(lambda: sharing((1, 0, 1, 0, 0)))


def test_transformers_counts_from_zero() -> None:
    """`GlmMoeDsaConfig`'s formula, whose layers begin with 0 and whose offset is at least 1."""
    for freq, offset in ((2, 1), (4, 2), (4, 3), (3, 5)):
        theirs = tuple(int(max(i - offset + 1, 0) % freq == 0) for i in range(13))
        assert indexer_layers(13, freq, offset) == theirs


def test_ling_two_under_the_name_of_the_first() -> None:
    config = {**RELEASED["Ling-2.0"], "model_type": "bailing_moe"}
    assert family_of_config(config).name == "bailing_moe_v2"
    found, megatron = imported(config, directory(config))
    assert export_targets(specs(megatron), found.args, config).config["model_type"] == "bailing_moe"


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
