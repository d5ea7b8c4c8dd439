"""config.json and names of a vision-language model as the released files have them."""

from dataclasses import replace
from typing import Any

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.mapping.checks import Spec, with_stored_norms
from ckpt_tools.megatron.huggingface.mapping.rules import SMALLEST
from ckpt_tools.megatron.huggingface.vision.towers import language_tower, whole_config

RELEASED: dict[str, Any] = {
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
EMBEDDING = Spec("bfloat16", (262208, 2560))
NAMES = {"language_model.model.embed_tokens.weight": EMBEDDING}


def test_a_text_config_of_few_fields_is_the_model_that_its_class_makes_of_it():
    """Gemma 3 of 4B parameters leaves out what its class has anyway; so does what an export writes back."""
    tower = language_tower(RELEASED, NAMES)
    model = read_config(FAMILIES["gemma3"], tower.config)
    sizes = (model.vocab_size, model.num_layers, model.num_attention_heads, model.num_query_groups)
    assert sizes == (262208, 34, 8, 4)
    assert (model.kv_channels, model.sliding_window, model.query_pre_attn_scalar) == (256, 1024, 256)
    assert (model.tied, model.params_dtype) == (True, "bfloat16")
    assert model.rope_scaling == ({"rope_type": "linear", "factor": 8.0},)
    assert whole_config(RELEASED, tower, {"vocab_size": 262208, "torch_dtype": "bfloat16"}) == RELEASED
    more = whole_config(RELEASED, tower, {"vocab_size": 262300, "torch_dtype": "float16"})
    assert more == {**RELEASED, "torch_dtype": "float16",
                    "text_config": {**RELEASED["text_config"], "vocab_size": 262300}}  # fmt: skip


def test_stored_norms_of_queries_and_keys_are_computed_whatever_the_settings_say():
    """Bridge's Gemma 3; those of latent attention are others."""
    norm = "decoder.layers.0.self_attention.q_layernorm.weight"
    assert with_stored_norms(SMALLEST, [norm]).qk_layernorm
    assert not with_stored_norms(SMALLEST, ["decoder.layers.0.mlp.linear_fc1.weight"]).qk_layernorm
    assert with_stored_norms(replace(SMALLEST, qk_layernorm=True), []).qk_layernorm
    assert not with_stored_norms(replace(SMALLEST, multi_latent_attention=True), [norm]).qk_layernorm


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("inner", [None, False, True])
def test_a_head_is_the_embedding_where_nothing_denies_it(outer, inner, has_head):
    said = {key: value for key, value in (("outer", outer), ("inner", inner)) if value is not None}
    config = {**RELEASED, "text_config": {**RELEASED["text_config"]}}
    for place, value in said.items():
        (config if place == "outer" else config["text_config"])["tie_word_embeddings"] = value
    names = {**NAMES, **({"language_model.lm_head.weight": EMBEDDING} if has_head else {})}
    if (outer, inner, has_head) == (False, True, False):
        with pytest.raises(MappingError, match="false, and true in text_config"):
            language_tower(config, names)
        return
    values = set(said.values())  # its class ties where none says it
    expected = values == {True} if has_head else True in values or not values
    model = read_config(FAMILIES["gemma3"], language_tower(config, names).config)
    assert model.tied is expected
