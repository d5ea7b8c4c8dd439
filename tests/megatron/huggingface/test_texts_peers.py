"""The texts of released config.json, which are written from memory, against the classes of transformers 4 and 5.

`test_transformers.py` runs this file under either. A class does not prove what a release says, but it can contradict
a text: by refusing a value or holding another, or where its docstring names that very release.
"""

import inspect
import json
import re
import sys
from typing import Any

import pytest

from tests.megatron.huggingface.released import DENSE, POPULAR, SIZES

transformers = pytest.importorskip("transformers", reason="the optional peer transformers is not installed")

# Shrunk in the texts, or about no number of the model.
OURS = SIZES.keys() - {"hidden_act", "attention_dropout", "tie_word_embeddings"} | {
    "head_dim", "moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "kv_lora_rank",
    "experts_per_token", "n_routed_experts", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_embd", "n_head", "n_layer", "n_positions", "n_ctx", "n_inner", "shared_expert_intermediate_size",
    "sliding_window", "layer_types", "no_rope_layers", "pad_token_id", "eos_token_id", "architectures", "auto_map",
    "transformers_version", "torch_dtype",
}  # fmt: skip
ROPE = {  # what transformers 5 keeps in `rope_parameters`
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"),
    *("rotary_emb_base", "rotary_pct"),
}
# Of a release that its class names: the fields that it says otherwise than the class would take for them.
SAID: dict[str, set[str]] = {
    "Mistral-7B-v0.1": {"rms_norm_eps"},
    "Qwen1.5-MoE-A2.7B": {"max_window_layers", "rope_theta"},
    "Qwen3-8B": {"max_window_layers", "rope_theta"},
    "DeepSeek-V2-Lite": {"first_k_dense_replace", "n_group", "topk_group", "rope_scaling"},
    "gpt-oss-20b": {"router_aux_loss_coef"},  # 0.9 in transformers 4
    "SmolLM3-3B": {"rope_theta"},
    "Seed-OSS-36B-Instruct": {"rope_theta", "rope_scaling"},
    "ERNIE-4.5-0.3B-PT": set(),
    "gemma-7b": {"hidden_activation"},
    "gpt2": {"task_specific_params"},
}
TEXTS: dict[str, dict[str, Any]] = {**POPULAR, **DENSE}


CLASSES = transformers.models.auto.configuration_auto.CONFIG_MAPPING
HELD = {name: text for name, text in TEXTS.items() if text["model_type"] in CLASSES}


@pytest.mark.parametrize("name", HELD)
def test_its_class_holds_what_a_text_says(name):
    """A window that `use_sliding_window` turns off apart."""
    text = json.loads(json.dumps(TEXTS[name]))
    made = CLASSES[text["model_type"]].from_dict(dict(text))
    held = made.to_dict()
    asked = text.keys() - ROPE - {"torch_dtype", "transformers_version"}
    asked -= {"sliding_window"} if text.get("use_sliding_window") is False else set()
    asked -= {"sliding_window_pattern"} if text.get("sliding_window_pattern", "") is None else set()
    assert {field: held.get(field, getattr(made, field, None)) for field in asked} == {
        field: text[field] for field in asked
    }


@pytest.mark.parametrize("name", [name for name in POPULAR if name in HELD])
def test_a_class_that_names_the_release_takes_what_it_says(name):
    text = TEXTS[name]
    kind = CLASSES[text["model_type"]]
    source = inspect.getsource(sys.modules[kind.__module__])
    named = re.search(rf"[/\"]{re.escape(name)}[\")]", source) is not None
    defaults = kind().to_dict()
    other = {field for field in text.keys() & defaults.keys() - OURS if text[field] != defaults[field]}
    assert not named or other <= SAID[name]
