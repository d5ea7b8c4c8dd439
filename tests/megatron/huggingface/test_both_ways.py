"""Every family by its rules alone: released configurations and tiny models both ways, and what is refused by name.

Then what single families do: where rows lie, prediction layers, indexers, windows, settings in Bridge's words.
"""

from typing import Any

import numpy as np
import pytest

from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.config.layer_patterns import indexer_layers, sharing
from ckpt_tools.megatron.huggingface.config.megatron_args import TOO_OLD, read_model_args
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import family_of_config, without_modules
from ckpt_tools.megatron.huggingface.mapping.targets import Exported, Imported, export_targets, import_targets
from ckpt_tools.megatron.huggingface.quantization.block_fp8 import LINEAR, BlockFp8, quantized_tensors
from ckpt_tools.model.catalog import Catalog
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
from tests.megatron.huggingface.released import DENSE, HYBRIDS, LATENT_YARN, POPULAR, RELEASED, SPARSE

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
TWICE = {"rope_type": "linear", "factor": 2.0}
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
    ("llama", {"rope_theta": ..., "rope_scaling": TWICE, "rope_parameters": {**TWICE, "rope_theta": 5e5}},
     "rope_theta is not set, but rope_parameters has 500000.0"),
    ("llama", {"rope_scaling": {**TWICE, "rope_theta": 1e6}, "rope_parameters": {**TWICE, "rope_theta": 1e4}},
     "rope_theta is 1000000.0, but rope_parameters has 10000.0"),
    ("llama", {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta is 500000.0 in it, and 1"),
    ("llama", {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 32}, "that one, transformers 4 8"),
    ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 32}, "takes that one, transformers 4 16"),
    *((name, {"sliding_window": window}, f"sliding_window is {window}, not a number of keys") for window in (0, -1)
      for name in ("mistral", "phi3", "starcoder2", "gemma3", "gpt_oss", "exaone4_windows")),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("llama", {"is_causal": None}, "is_causal is None: tokens see later ones"),
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
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads is 4, num_key_value_heads is 3"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, num_local_experts is 4"),
    ("DeepSeek-V3.2", {"topk_group": 3}, "topk_group is 3, n_group is 2"),
    ("DeepSeek-V3.2", {"n_group": 3}, "n_routed_experts is 4, n_group is 3: groups have the same size"),
    ("DeepSeek-V3.2", {"num_experts_per_tok": 3}, "per_tok is 3, topk_group is 1: 2 experts are in these"),
    ("DeepSeek-V3.2", {"layer_types": ["full_attention"] * 4}, "expected indexed_attention or"),
    ("DeepSeek-V3.2", {"mlp_layer_types": ["dense"] * 4}, DISAGREE),
    ("GLM-5", {"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
    ("GLM-5", {"indexer_types": ["shared", "full", "full", "full"]}, "no earlier layer whose choice"),
    ("GLM-5", {"index_topk_freq": 2, "index_skip_topk_offset": 0}, "no earlier layer whose choice"),
    ("GLM-5", {"indexer_types": ["full", "half", "full", "full"]}, "expected shared or full"),
    ("GLM-5", {"mlp_layer_types": ["dense"]}, "expected dense or sparse for each of 4 layers"),
    ("GLM-5", {"mlp_layer_types": [[]] * 4}, "expected dense or sparse for each of 4 layers"),
    ("GLM-5.2", {"index_skip_topk_offset": 1, "indexer_types": None, "num_nextn_predict_layers": 2},
     "Megatron counts them from 1 again"),
    *((name, {"head_dim": 8}, "head_dim is 8: transformers takes it for qk_rope_head_dim")
      for name in ("GLM-4.7-Flash", "deepseek_v2", "deepseek_v3", "youtu")),
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
    ("mixtral", {"moe_router_topk": 9}, False, "num_experts_per_tok is 9, num_local_experts is 4"),
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


NEXT, NEMOTRON_H, MAMBA2 = (HYBRIDS[name] for name in ("qwen3_next", "nemotron_h", "mamba2"))
FALCON = DENSE["Falcon-H1-1.5B-Base"]
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
IN_PROJ = "decoder.layers.0.self_attention.in_proj.weight."


def same(ours: Any, theirs: Any) -> bool:
    return bool(ours.tobytes() == theirs.tobytes())


# By hand, as transformers splits them: a mistake of both directions would come back bit for bit.


def test_where_the_parts_of_a_projection_lie():
    tensors = directory(HYBRIDS["qwen3_5"])
    net, parts = "model.layers.0.linear_attn.", imported(HYBRIDS["qwen3_5"], tensors)[1]
    for part, where in {"query": slice(0, 6), "key": slice(6, 12), "value": slice(12, 32)}.items():
        assert same(parts[IN_PROJ + part], tensors[net + "in_proj_qkv.weight"][where])
        conv = parts[IN_PROJ.replace("in_proj", "conv1d") + part]
        assert same(conv, tensors[net + "conv1d.weight"][where])
    for part, name in (("z", "in_proj_z"), ("beta", "in_proj_b"), ("alpha", "in_proj_a")):
        assert same(parts[IN_PROJ + part], tensors[f"{net}{name}.weight"])
    tensors = directory(NEMOTRON_H)
    mixer, parts = "backbone.layers.0.mixer.", imported(NEMOTRON_H, tensors)[1]
    for part, start, stop in (("z", 0, 12), ("x", 12, 24), ("B", 24, 34), ("C", 34, 44), ("dt", 44, 48)):
        assert same(parts[f"decoder.layers.0.mixer.in_proj.weight.{part}"],
                    tensors[mixer + "in_proj.weight"][start:stop])  # fmt: skip
    for kind in ("weight", "bias"):
        for part, start, stop in (("x", 0, 12), ("B", 12, 22), ("C", 22, 32)):
            found = parts[f"decoder.layers.0.mixer.conv1d.{kind}.{part}"]
            assert same(found, tensors[f"{mixer}conv1d.{kind}"][start:stop])


def test_rows_of_fused_projections():
    """Queries of all groups, then keys, then values; gate and up as Megatron has them."""
    config = POPULAR["phi-4"]
    tensors = directory(config)
    _, megatron = imported(config, tensors)
    fused, rows = (
        tensors["model.layers.1.self_attn.qkv_proj.weight"],
        [*range(8), *range(16, 20), *range(24, 28)],
    )
    assert same(megatron[QKV][:16], fused[rows])
    assert same(megatron[QKV][16:], fused[[*range(8, 16), *range(20, 24), *range(28, 32)]])
    gate_up = tensors["model.layers.1.mlp.gate_up_proj.weight"]
    assert same(megatron["decoder.layers.1.mlp.linear_fc1.weight"], gate_up)


@pytest.mark.parametrize(
    ("config", "turned"),
    [(POPULAR["ERNIE-4.5-0.3B-PT"] | {"head_dim": 4}, [0, 2, 1, 3]),
     (config_of("glm") | {"head_dim": 8}, [0, 2, 1, 3, 4, 5, 6, 7])],
)  # fmt: skip
def test_rotary_pairs_that_are_neighbours(config, turned):
    """Megatron has them half of the rotated rows apart, the rest of a head alike; not with rotary_interleaved."""
    tensors, dim = directory(config), len(turned)
    found, megatron = imported(config, tensors)
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    ours = megatron[QKV]
    assert same(ours[:dim], q[turned]) and same(ours[2 * dim : 3 * dim], k[turned])
    assert same(ours[3 * dim : 4 * dim], v[:dim])
    if "model.layers.1.self_attn.q_proj.bias" in tensors:
        theirs = tensors["model.layers.1.self_attn.q_proj.bias"]
        assert same(megatron[QKV.replace("weight", "bias")][:dim], theirs[turned])
    _, again = exported(megatron, {**found.args, "rotary_interleaved": True}, config)
    assert same(again["model.layers.1.self_attn.q_proj.weight"][:dim], ours[:dim])


def test_rows_that_are_grouped_on_both_sides():
    """A fused projection is Megatron's own, unless that has rotary pairs in neighbouring rows."""
    tensors = directory(NEOX)
    found, megatron = imported(NEOX, tensors)
    theirs, ours = "gpt_neox.layers.1.attention.query_key_value.weight", megatron[QKV]
    assert same(ours, tensors[theirs])
    _, turned = exported(megatron, {**found.args, "rotary_interleaved": True}, NEOX)
    pairs = [0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11]  # q, k, v of a head
    assert same(turned[theirs][:12], ours[pairs]) and same(turned[theirs][36:], ours[36:][pairs])


def test_mimo_joins_the_inputs_of_a_prediction_layer_the_other_way_round():
    """Bridge exchanges the halves of `input_proj` (mimo_bridge.py); its layers lie beside the model's."""
    config = DENSE["MiMo-7B-Base"]
    tensors = directory(config)
    _, megatron = imported(config, tensors)
    theirs, ours = tensors["model.mtp_layers.0.input_proj.weight"], megatron["mtp.layers.0.eh_proj.weight"]
    assert np.array_equal(ours, np.concatenate([theirs[:, 16:], theirs[:, :16]], axis=1))
    inner = megatron["mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"]
    assert same(inner[20:], tensors["model.mtp_layers.0.mlp.up_proj.weight"])


def test_norms_over_heads_are_as_wide_as_all():
    megatron = imported(SPARSE["MiniMax-M2"], directory(SPARSE["MiniMax-M2"]))[1]
    assert megatron["decoder.layers.0.self_attention.q_layernorm.weight"].shape == (16,)
    assert megatron["decoder.layers.0.self_attention.k_layernorm.weight"].shape == (8,)


def test_norms_of_nemotron_are_centred_at_zero():
    """Weights are stored as weight - 1, and so Megatron stores them; biases are not."""
    config = config_of("nemotron")
    found, megatron = imported(config, directory(config))
    args = {**found.args, "layernorm_zero_centered_gamma": False, "apply_layernorm_1p": False}
    made = export_targets(specs(megatron), args)
    assert made.offsets == {one.key: -1.0 for one in made.tensors if "norm.weight" in one.key}
    whole = {**found.args, "layernorm_zero_centered_gamma": True, "rotary_percent": 1.0}
    assert export_targets(specs(megatron), whole).family.name == "nemotron"
    plain = export_targets(specs(megatron), {**args, "rotary_percent": 1.0})
    assert plain.family.name == "jais2" and not plain.offsets


@pytest.mark.parametrize("name", ["qwen3_5_moe", "nemotron_3", "qwen3_moe"])
def test_experts_of_one_tensor_are_read(name):
    """As transformers 5 holds them, and as Qwen3.5 is published; those of a prediction layer too."""
    config = HYBRIDS[name] if name in HYBRIDS else config_of(name)
    tensors = directory(config)
    _, megatron = imported(config, tensors)
    fused: dict[str, Any] = {}
    for key, array in tensors.items():
        head, experts, tail = key.partition(".experts.")
        if experts:
            fused.setdefault(f"{head}.experts.{tail.split('.')[1]}", []).append(array)
    blocks = {key.rpartition(".")[0] for key in fused}
    for block in blocks if name != "nemotron_3" else ():
        gate, up = fused.pop(f"{block}.gate_proj"), fused.pop(f"{block}.up_proj")
        fused[f"{block}.gate_up_proj"] = [np.concatenate(pair) for pair in zip(gate, up, strict=True)]
    rest = {key: array for key, array in tensors.items() if ".experts." not in key}
    _, again = imported(config, rest | {key: np.stack(arrays) for key, arrays in fused.items()})
    assert any("mtp" in block for block in blocks) == (name == "qwen3_5_moe")
    assert_same(again, megatron)


def test_parts_of_one_tensor_have_one_type():
    found, megatron = imported(NEXT, directory(NEXT))
    parameters = specs(megatron)
    parameters[IN_PROJ + "z"] = parameters[IN_PROJ + "z"]._replace(dtype="bfloat16")
    text = problems(lambda: export_targets(parameters, found.args))
    assert f"{IN_PROJ}query and what is one tensor with it are stored as bfloat16 and float32" in text


# Settings in Bridge's words.


def as_bridge(args: dict[str, Any], function: str, **more: Any) -> dict[str, Any]:
    """The settings as the `model` section of Bridge's run_config.yaml has them."""
    renamed = {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon"}
    dropped = ("swiglu", "squared_relu", "quick_geglu", "untie_embeddings_and_output_weights", "apply_layernorm_1p",
               "use_rotary_position_embeddings", "group_query_attention", "bias_gelu_fusion")  # fmt: skip
    made = {renamed.get(name, name): value for name, value in args.items() if name not in dropped}
    return made | {
        "activation_func": {"_target_": function, "_call_": False},
        "gated_linear_unit": function.endswith("silu"),
        "share_embeddings_and_output_weights": False,
        **more,
    }


@pytest.mark.parametrize(
    ("config", "function", "more"),
    [
        (NEXT, "torch.nn.functional.silu", {"linear_attention_freq": 4}),
        (HYBRIDS["nemotron_3"], "megatron.core.activations.squared_relu", {"hybrid_attention_ratio": 0.0}),
        (NEMOTRON_H, "megatron.core.activations.squared_relu",
         {"hybrid_layer_pattern": "M-M|*-M", "hybrid_override_pattern": None}),
        (config_of("nemotron"), "megatron.bridge.models.nemotron.nemotron_bridge.squared_relu", {}),
        # `falconh1_ratio` 1 without a pattern: every layer has Mamba and attention side by side, and an MLP
        (FALCON, "torch.nn.functional.silu",
         {"falconh1_ratio": 1.0, "hybrid_override_pattern": None, "hybrid_attention_ratio": 0.0, "use_mamba": True,
          "d_conv": 4, "chunk_size": 128, "A_init_range": [1, 16], "dt_min": 0.001}),
    ],
)  # fmt: skip
def test_bridges_settings_are_read(config, function, more):
    found, megatron = imported(config, directory(config))
    made = export_targets(specs(megatron), as_bridge(dict(found.args), function, **more))
    assert made.config == export_targets(specs(megatron), found.args).config
    assert not [note for note in made.notes if "not known" in note]


def test_bridge_says_the_windows_again():
    """Its K-EXAONE has them layer by layer too: the same is taken, another pattern is refused."""
    config = SPARSE["K-EXAONE"]
    found, megatron = imported(config, directory(config))
    bridge = {"layer_types": config["layer_types"], "sliding_windows": [4, 4, 4, 0], "swiglu_limits": None,
              "mtp_layer_types": ["full_attention"], "mtp_sliding_windows": [0]}  # fmt: skip
    made = export_targets(specs(megatron), {**found.args, **bridge}, config)
    assert {one.key for one in made.tensors} == directory(config).keys()
    for name, other in (("layer_types", ["full_attention"] * 4), ("sliding_windows", [4, 4, 8, 0]),
                        ("mtp_layer_types", ["sliding_attention"]), ("mtp_sliding_windows", [4])):  # fmt: skip
        args = {**found.args, **bridge, name: other}
        assert f"{name} is " in problems(lambda args=args: export_targets(specs(megatron), args, config))


def test_settings_of_falcon_h1():
    found, megatron = imported(FALCON, directory(FALCON))
    assert found.args["key_multiplier"] == FALCON["key_multiplier"]
    less = {name: value for name, value in found.args.items() if name != "ssm_multipliers"}
    assert "ssm_multipliers: the checkpoint has None" in problems(lambda: exported(megatron, less, FALCON))
    config = {**FALCON, "mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_n_heads": 8}  # 2 x 16 of 8 heads
    args = imported(config, directory(config))[0].args
    assert (args["mamba_num_heads"], args["mamba_head_dim"]) == (8, 4)


# Prediction layers.


def test_prediction_layers_are_those_there_are():
    """config.json of Qwen3-Next does not say it; the layer has the names that NVIDIA's bridge gives it."""
    tensors = directory(NEXT, mtp_num_layers=1)
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.mlp.gate.weight",
            "mtp.layers.0.self_attn.q_proj.weight"} < tensors.keys()  # fmt: skip
    found, megatron = imported(NEXT, tensors)
    assert found.args["mtp_num_layers"] == 1
    assert "mtp.layers.0.transformer_layer.mlp.shared_experts.gate_weight" in megatron
    config = HYBRIDS["qwen3_5"]
    found, megatron = imported(config, directory({**config, "mtp_num_hidden_layers": 0}))
    assert found.args["mtp_num_layers"] is None and any("the files hold none" in note for note in found.notes)
    text = problems(lambda: export_targets(specs(megatron), {**found.args, "mtp_num_layers": 2}))
    assert "mtp_num_layers is 2; config.json of Qwen3_5ForCausalLM has names for one" in text
    config = {**NEXT, "layer_types": ["full_attention", "linear_attention"] * 4}
    mixed = {**directory(config), **{name: one for name, one in tensors.items() if name.startswith("mtp.")}}
    text = problems(lambda: import_targets(specs(mixed), config))
    assert "the last layer is a gated delta net, which makes Megatron's prediction layer one" in text


def test_the_prediction_layer_of_k_exaone_is_dense():
    """Without experts though the last layer has some; only Bridge builds it so."""
    config = SPARSE["K-EXAONE"]
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    gate, up = (tensors[f"mtp.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    fc1 = megatron["mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"]
    assert fc1.tobytes() == gate.tobytes() + up.tobytes()
    assert not [name for name in megatron if name.startswith("mtp.") and "expert" in name]
    said = "prediction module is dense, as only Megatron-Bridge builds it"
    assert any(said in note for note in found.notes)
    bare = {name: array for name, array in tensors.items() if not name.startswith("mtp.")}
    found, _ = imported(config, bare)
    assert found.args["mtp_num_layers"] is None and not [note for note in found.notes if said in note]


# Experts and sparse attention.


@pytest.mark.parametrize("terms", [(1.0, 1.0), (0.7, 0.7), (None, None), (1.0, None), (None, 0), (0.7, 0.3)])
def test_terms_of_yarn_that_all_read_alike(terms):
    config = {**SPARSE["Moonlight"],
              "rope_scaling": {**LATENT_YARN, "mscale": terms[0], "mscale_all_dim": terms[1]}}  # fmt: skip
    args = imported(config, directory(config))[0].args
    expected = (1.0 if terms[0] is None else terms[0], terms[1] or 0.0)
    assert (args["mscale"], args["mscale_all_dim"]) == expected


@pytest.mark.parametrize(
    ("more", "factor"),
    [({"mscale": 1.0}, None), ({"mscale_all_dim": 1.0}, None), ({"mscale": 0.0, "mscale_all_dim": 1.0}, None),
     ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0), ({"mscale": 2.0, "mscale_all_dim": 0.5}, 1.194465)],
)  # fmt: skip
def test_terms_of_yarn_of_plain_attention(more, factor):
    """transformers makes a factor of both; one alone says nothing. Megatron-LM has no argument for another factor."""
    config = {**config_of("arcee"), "rope_scaling": {**YARN, **more}}
    (scaling,) = read_config(FAMILIES["arcee"], config).rope_scaling
    assert scaling is not None
    assert scaling.get("attention_factor") == (None if factor is None else pytest.approx(factor, rel=1e-6))
    if factor is not None:
        assert "cannot set attention_factor" in problems(lambda: imported(config, directory(config)))


@pytest.mark.parametrize(
    ("name", "groups"),
    [("DeepSeek-V3.2", (8, 4)), ("Moonlight", (8, 4)), ("Ling-2.0", (8, 4)), ("GLM-5", (None, None))],
)
def test_groups_of_experts_where_none_are_told(name, groups):
    """They are the class's own; one group is none, and one of eight is a choice."""
    config = {key: value for key, value in SPARSE[name].items() if key not in ("n_group", "topk_group")}
    config |= dict.fromkeys({"num_experts", "n_routed_experts"} & config.keys(), 32)
    tensors = directory(config)

    def read(**changes: Any) -> tuple[Any, Any]:
        args = imported({**config, **changes}, tensors)[0].args
        return args["moe_router_num_groups"], args["moe_router_group_topk"]

    assert read() == groups
    assert read(n_group=1, topk_group=1) == read(n_group=None) == (None, None)
    assert read(topk_group=1) == ((8, 1) if groups[0] else (None, None))


def test_settings_of_experts_say_nothing_of_a_model_without_any():
    """Every Megatron job has them in its args."""
    found, megatron = imported(NEMOTRON_H, directory(NEMOTRON_H))
    experts = {"moe_router_topk": 6, "moe_router_score_function": "softmax", "moe_ffn_hidden_size": 9}
    for reference in (None, NEMOTRON_H):
        made = export_targets(specs(megatron), {**found.args, **experts}, reference)
        assert made.config["n_routed_experts"] == 8


def test_a_model_without_a_shared_expert_is_no_glm():
    found, megatron = imported(POPULAR["GLM-4.6"], directory(POPULAR["GLM-4.6"]))
    rest = {name: array for name, array in megatron.items() if "shared_experts" not in name}
    text = problems(
        lambda: export_targets(specs(rest), {**found.args, "moe_shared_expert_intermediate_size": None})
    )
    assert "moe_shared_expert_intermediate_size is not set" in text


def test_norms_of_sparse_attention_are_read_where_they_are_fused():
    config = SPARSE["DeepSeek-V3.2"]
    found, megatron = imported(config, directory(config))
    fused = {name.replace("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"): array
             for name, array in megatron.items()}  # fmt: skip
    assert len(fused) == len(megatron) and fused.keys() != megatron.keys()
    made = export_targets(specs(fused), found.args)
    assert {one.key for one in made.tensors} == directory(config).keys()


def test_only_some_layers_have_an_indexer():
    config = SPARSE["GLM-5.2"]
    tensors = directory(config)
    found, _ = imported(config, tensors)
    having = {int(key.split(".")[2]) for key in tensors if ".indexer." in key}
    assert having == {0, 1, 2, 6, 8}  # the last is the prediction layer
    assert (found.args["dsa_indexer_topk_freq"], found.args["dsa_indexer_skip_topk_offset"]) == (4, 3)
    numbers = {key: value for key, value in config.items() if key != "indexer_types"}
    letters = {**numbers, "index_topk_pattern": "FFFSSSFS", "index_topk_freq": 1}
    for other in (numbers, letters):
        assert imported(other, tensors)[0].args == found.args


def test_a_pattern_of_indexers_and_its_numbers():
    """`GlmMoeDsaConfig`'s formula, whose layers begin with 0 and whose offset is at least 1."""
    for freq in (1, 2, 3, 4):
        for offset in (0, 1, 2, 3, 5):
            pattern = indexer_layers(11, freq, offset)
            assert sharing(pattern or (1,) * 11) == ((freq, max(offset, 1)) if freq > 1 else (1, 0))
            theirs = tuple(int(max(i - max(offset, 1) + 1, 0) % freq == 0) for i in range(11))
            assert (pattern or (1,) * 11) == theirs
    assert "every n-th layer" in problems(lambda: sharing((1, 0, 1, 0, 0)))


# Windows, rotation and layers in turns.


def test_the_rotated_part_is_read_wherever_it_stands():
    """transformers 5 keeps it with the base; the class rotates half of each head unless told, so 1 says something."""
    told = {key: value for key, value in POPULAR["GLM-4.6"].items() if key != "partial_rotary_factor"}
    tensors = directory(told)
    assert imported(told, tensors)[0].args["rotary_percent"] == 0.5
    del told["rope_theta"], told["rope_scaling"]
    for part in (0.25, 1.0):
        rope = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": part}
        assert imported({**told, "rope_parameters": rope}, tensors)[0].args["rotary_percent"] == part


def test_layers_without_rotary_embedding():
    """config.json names the layers that rotate, Megatron those that do not; both have a short form."""
    told = {key: value for key, value in config_of("smollm3").items() if key != "no_rope_layers"}
    assert (
        "no_rope_freq" not in imported(told, directory(told))[0].args
    )  # the fourth layer would be the first
    eight = {**told, "num_hidden_layers": 8}
    for changes, expected in (
        ({}, [0, 0, 0, 1] * 2),
        ({"no_rope_layer_interval": 3}, [0, 0, 1, 0, 0, 1, 0, 0]),
    ):
        assert imported({**eight, **changes}, directory(eight))[0].args["no_rope_freq"] == expected
    args = imported(LLAMA, directory(LLAMA))[0].args
    assert read_model_args({**args, "no_rope_freq": 2}).no_rope_layers == (0, 1)
    for wrong in ([1], [1, 2], 3):
        assert "no_rope_freq is" in problems(lambda w=wrong: read_model_args({**args, "no_rope_freq": w}))


def test_a_window_on_some_layers_of_a_llama_is_a_ministral():
    found, megatron = imported(LLAMA, directory(LLAMA))
    args = {**found.args, "window_size": (7, 0), "window_attn_skip_freq": 2}
    config = export_targets(specs(megatron), args).config
    assert config["architectures"] == ["MinistralForCausalLM"] and config["sliding_window"] == 8
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
    text = problems(lambda: export_targets(specs(megatron), args, mistral))
    assert "sliding windows on some layers only" in text


@pytest.mark.parametrize(
    ("window", "kinds", "name"),
    [(8, None, "mistral"), (8, ["sliding_attention"] * 2, "mistral"), (None, ["full_attention"] * 2, "mistral"),
     (8, ["full_attention"] * 2, "ministral"), (8, ["full_attention", "sliding_attention"], "ministral"),
     (8, 5, "ministral")],
)  # fmt: skip
def test_a_mistral_whose_layers_differ_is_a_ministral(window, kinds, name):
    """As the AutoConfig of transformers 5 has it."""
    config = {**LLAMA, "model_type": "mistral", "sliding_window": window, "layer_types": kinds}
    assert family_of_config(config).name == name


@pytest.mark.parametrize(("variant", "factor"), [("cwm_unscaled", 16.0), ("gpt_oss_unscaled", 32.0)])
def test_no_scaling_is_said_where_null_is_one(variant, factor):
    """transformers 5 scales by the class's own default where `rope_scaling` is null."""
    unscaled = config_of(variant)
    found, megatron = imported(unscaled, directory(unscaled))
    assert found.args["use_rope_scaling"] is False and found.args["position_embedding_type"] == "rope"
    made = export_targets(specs(megatron), found.args, unscaled)
    assert made.config["rope_scaling"] == {"rope_type": "default"}
    of_v5 = {key: value for key, value in unscaled.items() if not key.startswith("rope_")}
    (scaling,) = read_config(FAMILIES[variant.removesuffix("_unscaled")], of_v5).rope_scaling
    assert scaling is not None and scaling["factor"] == factor
    of_v5["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert imported(of_v5, directory(unscaled))[0].args["use_rope_scaling"] is False


def test_a_model_of_attention_alone_keeps_the_sizes_of_its_class():
    config = {**NEXT, "full_attention_interval": 1}
    found, megatron = imported(config, directory(config))
    assert "linear_attention_freq" not in found.args
    made = export_targets(specs(megatron), found.args).config
    assert made["layer_types"] == ["full_attention"] * 8 and made["linear_num_key_heads"] == 16


# What is quantized, and what is said.


@pytest.mark.parametrize("variant", ["starcoder2", "nemotron", "glm", "stablelm", "persimmon"])
def test_all_linears_of_a_layer_are_quantized_or_none(variant):
    config, family = config_of(variant), FAMILIES[variant]
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    targets, nothing = export_targets(specs(megatron), found.args).tensors, Catalog("", {}, {})
    if variant == "persimmon":  # under names that no quantized model has
        text = problems(lambda: quantized_tensors(targets, nothing, family, BlockFp8()))
        assert "no PersimmonForCausalLM is published so" in text
        return
    quantized = quantized_tensors(targets, nothing, family, BlockFp8())
    assert quantized.count == sum(".layers." in name and array.ndim == 2 for name, array in tensors.items())
    kept = ["lm_head"] if "lm_head.weight" in tensors else []
    assert quantized.settings["modules_to_not_convert"] == kept


def test_the_indexer_is_quantized_as_the_release_is():
    """Queries and keys of the indexer are codes; the linear that weighs its heads is not."""
    tensors = [key for key in directory(SPARSE["DeepSeek-V3.2"]) if ".0.self_attn." in key]
    assert {key.removeprefix("model.layers.0.self_attn.") for key in tensors if LINEAR.search(key)} == {
        "q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight", "o_proj.weight",
        "indexer.wq_b.weight", "indexer.wk.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "note", "is_said"),
    [({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "architectures is ['LlamaForSeq", True),
     ({**LLAMA, "architectures": ["LlamaForCausalLM"]}, "architectures is", False),
     (MAMBA2, "transformers 4 normalizes all 4 groups of Mamba heads together", True),
     ({**MAMBA2, "n_groups": 1}, "transformers 4 normalizes", False), (NEMOTRON_H, "above time_step_min", True),
     (MAMBA2, "time_step_min", False), ({**MAMBA2, "layer_norm_epsilon": 1e-6}, "epsilon 1e-5", True),
     (FALCON, "its layers come from Megatron-Bridge", True),
     (DENSE["EXAONE-4.0-32B"], "its layers come from Megatron-Bridge", True)],
)  # fmt: skip
def test_an_import_says_what_differs(config, note, is_said):
    found, megatron = imported(config, directory(config))
    assert any(note in one for one in found.notes) == is_said
    if "come from" not in note:
        assert any(note in one for one in exported(megatron, found.args, config)[0].notes) == is_said


def test_heads_of_a_model_that_does_not_attend():
    """As many as divide by a tensor-parallel size; imports once had one."""
    found, megatron = imported(MAMBA2, directory(MAMBA2))
    assert found.args["num_attention_heads"] == MAMBA2["num_heads"] == 8
    made, _ = exported(megatron, {**found.args, "num_attention_heads": 1}, MAMBA2)
    assert made.config["num_attention_heads"] == 1
