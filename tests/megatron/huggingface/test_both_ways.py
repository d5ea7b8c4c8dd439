"""Every family by its rules alone: released configurations and tiny models both ways, and what is refused by name."""

from typing import Any

import numpy as np
import pytest

from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.config.megatron_args import TOO_OLD
from ckpt_tools.megatron.huggingface.families.identify import family_of_config, without_modules
from ckpt_tools.megatron.huggingface.mapping.targets import Exported, Imported, export_targets
from tests.megatron.huggingface.by_rules import (
    LLAMA,
    assert_same,
    directory,
    exported,
    imported,
    problems,
    specs,
)
from tests.megatron.huggingface.models import CONFIGS, LIKE, LLAMA3_ROPE, YARN, config_of, family_of
from tests.megatron.huggingface.released import DENSE, HYBRIDS, LATENT_YARN, RELEASED

NEOX = DENSE["RedPajama-INCITE-Base-3B-v1"]
TEXTS = {**{variant: config_of(variant) for variant in CONFIGS}, **RELEASED, "llama": LLAMA}
TWO_BASES = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}


def there_and_back(config: dict[str, Any], with_reference: bool) -> tuple[Imported, Exported]:
    """Imported and exported again, with the same names and bits."""
    # config.json of Qwen3-Next says nothing of prediction layers
    layers: dict[str, Any] = {"mtp_num_layers": 1} if config is HYBRIDS["qwen3_next"] else {}
    tensors = {  # the norm of a gated delta net as trained ones are: subtracting 1 from it loses nothing
        name: np.clip(1 + array / 8, 0.5, 2) if name.endswith("linear_attn.norm.weight") else array
        for name, array in directory(config, **layers).items()
    }
    found, megatron = imported(config, tensors)
    made, again = exported(megatron, found.args, config if with_reference else None)
    assert_same(again, tensors)
    return found, made


@pytest.mark.parametrize("name", RELEASED)
def test_a_release_is_taken_whole(name):
    """No field is unknown or refused; names, bits and every field come back."""
    config = RELEASED[name]
    found, made = there_and_back(config, True)
    assert not [note for note in (*found.notes, *made.notes) if "not known" in note]
    rewritten = {"rope_scaling", "rope_parameters", "torch_dtype", "dtype", "transformers_version"}
    same = [key for key in config.keys() - rewritten if None not in (config[key], made.config[key])]
    assert {key: made.config[key] for key in same} == {key: config[key] for key in same}
    said = {**config, "torch_dtype": "float32"}
    assert read_config(found.family, made.config) == read_config(found.family, said)


# Arguments by which Megatron builds the model; `test_megatron_peer.py` runs it.
ARGS: dict[str, dict[str, Any]] = {
    "seed_oss": {"add_qkv_bias": True}, "ernie4_5": {"rotary_interleaved": False, "add_bias_linear": False},
    "ernie4_5_bias": {"add_bias_linear": True}, "smollm3": {"no_rope_freq": [0, 1]},
    "phi3_partial": {"rotary_percent": 0.75, "window_size": (7, 0)},
    "nemotron": {"squared_relu": True, "layernorm_zero_centered_gamma": True, "rotary_percent": 0.4},
    "nemotron_bias": {"add_bias_linear": True}, "jais2": {"add_bias_linear": True, "rotary_percent": 1.0},
    "persimmon": {"qk_layernorm": True, "add_bias_linear": True, "rotary_base": 25000.0},
    "arcee": {"normalization": "RMSNorm", "squared_relu": True},
    "starcoder2": {"window_size": (7, 0), "bias_gelu_fusion": True, "add_bias_linear": True},
    "starcoder2_gelu": {"bias_gelu_fusion": False},
    "gpt_neox": {"group_query_attention": False, "rotary_percent": 0.25, "bias_gelu_fusion": False},
    "gpt_bigcode": {"num_query_groups": 1, "group_query_attention": True},
    "gpt_bigcode_heads": {"group_query_attention": False},
    "stablelm": {"swiglu": True, "add_qkv_bias": True, "rotary_percent": 0.25},
    "glm": {"add_qkv_bias": True, "rotary_percent": 0.5, "rotary_interleaved": False},
    "glm4_moe": {"add_qkv_bias": True, "rotary_percent": 0.5, "moe_layer_freq": [0, 1]},
    "ministral": {"window_size": (7, 0), "window_attn_skip_freq": [0, 1]},
    "cwm": {"window_attn_skip_freq": [0, 1], "rope_scaling_factor": 16.0},
    "youtu": {"multi_latent_attention": True, "num_experts": None},
    "qwen3_next": {"linear_attention_freq": [1, 1, 1, 0], "experimental_attention_variant": "gated_delta_net",
                   "attention_output_gate": True, "rotary_percent": 0.25, "apply_layernorm_1p": True},
    "nemotron_h": {"hybrid_override_pattern": "M-*M", "is_hybrid_model": True, "squared_relu": True,
                   "mamba_num_heads": 6, "mamba_state_dim": 7, "mamba_num_groups": 2,
                   "position_embedding_type": "none", "use_rotary_position_embeddings": False},
    "glm_moe_dsa_shared": {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 2},
}  # fmt: skip


PADDED = ("smollm3", "phi3", "glm", "youtu")  # whose class has a default beyond a small vocabulary


@pytest.mark.parametrize("variant", CONFIGS)
def test_a_tiny_model_goes_both_ways(variant):
    """Without a config.json, unless its parameters and arguments are those of another family too."""
    config = {key: value for key, value in config_of(variant).items() if key != "pad_token_id"}
    is_open = "linear" in str(config.get("rope_scaling"))  # Megatron-LM ignored the argument in many versions
    alone = variant not in LIKE and not is_open and family_of(variant) not in ("gemma2", "gemma3")
    found, made = there_and_back(config, not alone)
    family, said = found.family, {**config, "torch_dtype": "float32"}
    assert {name: found.args[name] for name in ARGS.get(variant, {})} == ARGS.get(variant, {})
    assert read_config(family, made.config) == read_config(family, said)
    assert family.config_fields <= made.config.keys()  # the class may take something else without one
    if family.name in PADDED:
        assert made.config["pad_token_id"] is None
    if variant == "llama2":
        assert not [name for name in found.args if name.startswith(("linear_", "mamba_", "hybrid_"))]


BESIDE = "attention and MLP of a layer run in parallel"
EXPECTED = "layer_types: expected full_attention or sliding_attention for each of"
WINDOWS = ["full_attention", "sliding_attention"]
STRANGE_KINDS: tuple[Any, ...] = (
    "full_attention",
    5,
    WINDOWS * 3,
    ["linear_attention"] * 2,
    [1, 0],
    [[], []],
)
DISAGREE = "another field disagree"
# A config.json with changes (`...`: without the field), and why it is not imported.
NOT_IMPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"attention_bias": True}, "mlp_bias=False and another field disagree"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "no 'longrope' scaling"),
    ("llama", {"rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 4096}}, "llama3 scaling has"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 2.0}}, "cannot set"),
    ("llama", {"hidden_size": ...}, "hidden_size is missing"),
    ("llama", {"rope_theta": 5e5, "rope_local_base_freq": 1e4}, "rotate by 10000.0 and the others by 500000.0"),
    ("llama", {"rope_theta": ..., "rope_parameters": TWO_BASES}, "rotate by 10000.0 and the others by 500000.0"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", {"activation_function": "relu"}, "'relu' is not one of"),
    *(("qwen3", {"layer_types": kinds}, "- layer_types is") for kinds in (*STRANGE_KINDS, WINDOWS)),
    *((name, {"layer_types": kinds}, EXPECTED) for name in ("ministral", "cwm", "gpt_oss", "exaone4_windows")
      for kinds in STRANGE_KINDS),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob: Megatron computes as with True"),
    ("deepseek_v3_one_expert", {"norm_topk_prob": True}, "norm_topk_prob: Megatron computes as with False"),
    ("DeepSeek-V3.2", {"indexer_rope_interleave": True}, "indexer_rope_interleave is True"),
    ("DeepSeek-V3.2", {"rope_interleave": False}, "rope_interleave is False"),
    ("DeepSeek-V3.2", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "attention has no 'linear' scaling"),
    ("DeepSeek-V3.2", {"rope_scaling": {**LATENT_YARN, "mscale": None}}, "mscale None with mscale_all"),
    ("DeepSeek-V3.2", {"rope_scaling": {**LATENT_YARN, "mscale": 0.7, "mscale_all_dim": None}}, "mscale 0.7 with"),
    ("sarvam-105b", {"rope_scaling": {**LATENT_YARN, "mscale": 0, "mscale_all_dim": 0}}, "mscale 0 with mscale_all"),
    ("Solar-Open", {"rope_scaling": {**LATENT_YARN, "factor": None}}, "'yarn' scaling without a factor"),
    ("Moonlight", {"topk_group": 0}, "of 0 groups no expert can be chosen"),
    ("DeepSeek-V3.2", {"layer_types": ["full_attention"] * 4}, "expected indexed_attention or"),
    ("DeepSeek-V3.2", {"mlp_layer_types": ["dense"] * 4}, DISAGREE),
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
    ("GLM-4.6", {"rope_scaling": YARN}, "YaRN together with rotary_percent"),
    ("dots.llm1", {"sliding_window": 4, "max_window_layers": 2}, "4 on some layers"),
    ("dots.llm1", {"sliding_window": 4, "layer_types": ["sliding_attention"] * 4}, "4 on some layers"),
    ("dots.llm1", {"norm_topk_prob": False}, "norm_topk_prob: Megatron computes as with True"),
    ("MiniMax-M2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list is"),
    ("MiniMax-M2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
    ("MiniMax-M2", {"num_experts_per_tok": 1}, "weight 1"),
    ("MiniMax-M2", {"partial_rotary_factor": 0.25}, DISAGREE),
    ("OLMoE", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ("OLMoE", {"sliding_window": 4}, "sliding_window is 4"),
    ("K-EXAONE", {"sliding_window": None}, "without a window"),
    ("K-EXAONE", {"is_moe_layer": [True] * 4}, "is_moe_layer says"),
    ("K-EXAONE", {"layer_types": None}, "sliding_window_pattern 'LLLG' without layer_types"),
    ("Hy3", {"expert_hidden_dim": 8}, DISAGREE),
    ("Solar-Open", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1"),
    ("sarvam", {"n_routed_experts": 8}, "two names of one setting"),
    ("Ling-2.0", {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe"}, "architectures is"),
    ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types: expected linear_attention or full"),
    ("qwen3_next", {"layer_types": [[]] * 8}, "layer_types: expected linear_attention or full"),
    ("qwen3_next", {"full_attention_interval": 0.5}, "full_attention_interval is '0.5'"),
    ("qwen3_next", {"linear_num_value_heads": 5}, "5 rows of a projection cannot be those of 2 key heads"),
    ("qwen3_next", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "YaRN together with rotary_percent"),
    ("nemotron_h", {"num_hidden_layers": 7}, "it names 6 layers, num_hidden_layers is 7"),
    ("nemotron_h", {"hybrid_override_pattern": "M-MX-M"}, "'X' is not one of M, *, -, E"),
    ("nemotron_h", {"conv_kernel": 3}, "conv_kernel is 3"),
    ("nemotron_h", {"time_step_limit": [0.001, 0.1]}, "time_step_limit is [0.001, 0.1]"),
    ("nemotron_3", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1: prediction layers of a Hybrid"),
    ("nemotron_3", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("mamba2", {"expand": 1}, "expand=4 and another field disagree: both are Megatron's mamba_num_heads"),
    ("Falcon-H1-1.5B-Base", {"mamba_d_ssm": 25}, "heads of 4 do not make 25"),
    ("Falcon-H1-1.5B-Base", {"mamba_d_ssm": 28}, DISAGREE),
    ("Falcon-H1-1.5B-Base", {"mamba_use_mlp": False}, "layers have no MLP"),
    ("Falcon-H1-1.5B-Base", {"time_step_limit": [0.0, 1.0]}, "time steps have limits"),
    ("smollm3", {"mlp_bias": True}, DISAGREE),
    *(("smollm3", {"no_rope_layers": layers}, "no_rope_layers: expected 0 or 1") for layers in ([1], [1, 2], 3)),
    *(("phi3", {"rope_scaling": {"type": kind, "short_factor": [1.0], "long_factor": [2.0]}}, said)
      for kind, said in (("longrope", "has no 'longrope'"), ("su", "has no 'su'"), ("yarn", "cannot set"))),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "Phi3ForCausalLM is (None,)"),
    ("gpt_neox", {"use_parallel_residual": ...}, BESIDE), ("gpt_neox", {"use_parallel_residual": True}, BESIDE),
    ("gpt_neox", {"hidden_act": "relu"}, "'relu' is not one of"),
    ("gpt_neox", {"rotary_emb_base": 500, "rope_theta": 1e4}, "two names of one setting"),
    ("stablelm", {"rope_scaling": YARN}, "YaRN together with rotary_percent"),
    ("stablelm-2-1_6b", {"qk_layernorm": True, "use_parallel_residual": True}, "use_parallel_residual is True"),
    ("nemotron", {"mlp_bias": True}, DISAGREE),
    ("nemotron", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "NemotronForCausalLM is (None,)"),
    ("internlm3", {"qkv_bias": True}, DISAGREE),
    ("internlm3", {"qkv_bias": True, "attention_bias": False}, "two names of one setting"),
    ("internlm3", {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}, "Megatron has no 'dynamic' scaling"),
    ("ministral", {"sliding_window": None}, "does not run without a window"),
    *((name, {"rope_scaling": None}, "transformers 4 takes null for an embedding that is not scaled")
      for name in ("cwm", "gpt_oss")),
    ("exaone", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("persimmon", {"rope_theta": ...}, "rope_theta is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "text"), NOT_IMPORTED)
def test_what_megatron_does_not_compute_is_refused(name, changes, text):
    config = {key: value for key, value in {**TEXTS[name], **changes}.items() if value is not ...}
    assert text in problems(lambda: imported(config, directory(TEXTS[name])))


# A model with other arguments, whether its config.json is there, and why it is not exported.
NOT_EXPORTED: list[tuple[str, dict[str, Any], bool, str]] = [
    ("llama", {"normalization": "LayerNorm"}, False, "normalization is 'LayerNorm'; LlamaForCausalLM is 'RMSNorm'"),
    ("llama", {"swiglu": False}, False, "activation is 'gelu_erf'"),
    ("llama", {"rotary_percent": 0.5}, False, "rotary_percent is 0.5"),
    ("llama", {"window_size": [7, 0], "softmax_type": "off-by-one"}, False, "softmax_type"),
    ("llama", {"glu_linear_offset": 1.0}, False, "- glu_linear_offset is 1.0"),
    ("llama", {"activation_func_clamp_value": 7.0}, False, "- activation_func_clamp_value is 7.0"),
    ("llama", {"softmax_scale": 0.25}, False, "- softmax_scale, as 1 / its square, is 16.0"),
    ("llama", {"rotary_base": [10000, 1000000]}, False, "- the local rotary_base is 10000"),
    ("llama", {"attn_logit_softcapping": 50.0}, False, "- attn_logit_softcapping is 50.0"),
    ("llama", {"add_qkv_bias": True}, False, "- add_qkv_bias is True"),
    ("llama", {"swiglu": False, "gated_linear_unit": True, "activation_func": "relu"}, False, "is 'gated relu'"),
    ("gpt2", {"group_query_attention": True, "num_query_groups": 1}, True, "num_query_groups is 1"),
    ("gpt2", {"group_query_attention": True, "num_query_groups": 1}, False, "settings ask for [24, 16]"),
    ("deepseek_v3", {"moe_layer_freq": [1]}, True, "does not name 2 layers"),
    ("deepseek_v3", {"moe_layer_freq": [1, 2]}, True, "2 is not 0 or 1"),
    ("DeepSeek-V3.2", {"dsa_indexer_rope_interleaved": None}, False, TOO_OLD),
    ("DeepSeek-V3.2", {"dsa_indexer_rope_interleaved": True}, True, "dsa_indexer_rope_interleaved is True; Deep"),
    ("DeepSeek-V3.2", {"dsa_indexer_k_norm_epsilon": 1e-5}, False, "dsa_indexer_k_norm_epsilon is 1e-05"),
    ("DeepSeek-V3.2", {"dsa_indexer_scoring_relu": False}, False, "dsa_indexer_scoring_relu is False"),
    ("DeepSeek-V3.2", {"dsa_indexer_topk_freq": 2}, False, "indexer_layers is (1, 0, 1, 0)"),
    ("DeepSeek-V3.2", {"experimental_attention_variant": None}, False, "demands 'dsa'"),
    ("DeepSeek-V3.2", {"mscale": 0.7, "mscale_all_dim": 0.0}, False, "mscale 0.7 with mscale_all_dim 0.0: transf"),
    ("Moonlight", {"experimental_attention_variant": "dsa"}, False, "layers with another kind of attention"),
    ("GLM-4.6", {"rotary_interleaved": True}, False, "rotary_interleaved"),
    ("GLM-4.6", {"moe_router_score_function": "softmax"}, False, "moe_router_score_function"),
    ("MiniMax-M2", {"moe_router_topk": 1}, False, "gives a single expert the weight 1"),
    ("MiniMax-M2", {"rotary_percent": 0.3}, False, "rotary_percent 0.3 of 4 is not a whole number"),
    ("OLMoE", {"num_query_groups": 2, "group_query_attention": True}, True, "num_key_value_heads"),
    ("K-EXAONE", {"no_rope_freq": [0, 0, 1, 1]}, True, "layer_types: the checkpoint has (0, 0, 1, 1)"),
    ("K-EXAONE", {"window_size": None}, True, "sliding_window"),
    ("K-EXAONE", {"mtp_num_layers": 2}, True, "has names for one"),
    ("dots.llm1", {"moe_router_enable_expert_bias": False}, True, "moe_router_enable_expert_bias is False"),
    ("EXAONE-4.0-32B", {"no_rope_freq": None}, True, "layer_types: the checkpoint has ()"),
    ("EXAONE-4.0-32B", {"no_rope_freq": None}, False, "rotat"),
    ("EXAONE-4.0-32B", {"window_size": None, "window_attn_skip_freq": None}, True, "sliding_window: the checkpoint"),
    ("qwen3_next", {"experimental_attention_variant": "dsa"}, False, "layers with another kind of attention"),
    ("qwen3_next", {"attention_output_gate": False}, False, "attention_output_gate is False"),
    ("qwen3_next", {"linear_attention_freq": [1, 0]}, False, "linear_attention_freq"),
    ("qwen3_next", {"linear_attention_freq": 3}, False, "is missing"),
    ("qwen3_next", {"moe_router_score_function": "sigmoid"}, False, "moe_router_score_function is 'sigmoid'"),
    ("nemotron_3", {"hybrid_override_pattern": "MEM*E"}, False, "name 6 layers, their hybrid pattern 5"),
    ("nemotron_3", {"moe_router_score_function": "softmax"}, False, "moe_router_score_function is 'softmax'"),
    ("nemotron_3", {"squared_relu": False, "swiglu": True}, False, "activation is 'swiglu'"),
    ("nemotron_h", {"position_embedding_type": "rope"}, False, "position_embedding_type is 'rope'"),
    ("phi3", {"use_rope_scaling": True, "rope_scaling_factor": 8.0}, True, "rope_scaling: the checkpoint has"),
    ("gpt_bigcode", {"num_query_groups": 2}, True, "num_query_groups"),
    ("gpt_neox", {"add_bias_linear": False, "add_qkv_bias": False}, True, "add_bias_linear is False"),
    ("starcoder2", {"qk_layernorm": True}, True, "qk_layernorm is True"),
    ("nemotron", {"squared_relu": False}, True, "activation is 'gelu_erf'"),
    ("glm", {"no_rope_freq": [0, 1]}, True, "no_rope_freq is [0, 1]"),
    ("persimmon", {"rotary_interleaved": True}, True, "rotary_interleaved together with q/k norms"),
    ("ministral", {"window_size": None}, True, "sliding"),
    ("stablelm", {"num_query_groups": 1, "group_query_attention": True}, True, "num_key_value_heads"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "with_reference", "text"), NOT_EXPORTED)
def test_what_config_json_cannot_say_is_refused(name, args, with_reference, text):
    config = TEXTS[name]
    found, megatron = imported(config, directory(config))
    reference = config if with_reference else None
    assert text in problems(lambda: export_targets(specs(megatron), {**found.args, **args}, reference))


@pytest.mark.parametrize("kind", without_modules())
def test_what_megatron_core_has_no_modules_for(kind):
    text = problems(lambda: family_of_config({"model_type": kind}))
    assert f"{kind!r}, which Megatron core has no modules for: {without_modules()[kind]}" in text
