"""What export and import account for: names, shapes, vocabularies, norms, heads, prediction layers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ckpt_tools.errors import UnsupportedCheckpointError
from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.rules import expand
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets, import_targets
from tests.megatron.huggingface.by_rules import (
    DEEPSEEK,
    LLAMA,
    QWEN3_MOE,
    assert_same,
    directory,
    exported,
    imported,
    materialise,
    problems,
    specs,
)
from tests.megatron.huggingface.models import config_of
from tests.megatron.huggingface.released import GLM


def test_every_problem_of_an_export_is_named():
    found, megatron = imported(QWEN3_MOE, directory(QWEN3_MOE))
    parameters = specs(megatron)
    del parameters["decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight"]
    del parameters["decoder.layers.0.self_attention.linear_proj.weight"]
    parameters["decoder.layers.0.mlp.router.weight"] = Spec("float32", (4, 12))
    parameters["decoder.layers.0.surprise.weight"] = Spec("float32", (1,))
    parameters["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"] = Spec("float32", (12,))
    text = problems(lambda: export_targets(parameters, found.args))
    assert "decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight [12, 6] is missing" in text
    assert "decoder.layers.0.self_attention.linear_proj.weight [12, 16] is missing" in text
    assert "decoder.layers.0.mlp.router.weight has shape [4, 12], its settings ask for [3, 12]" in text
    assert "decoder.layers.0.surprise.weight: no rule of qwen3_moe has this parameter" in text
    assert "are two names of one parameter" in text
    assert text.count("\n  - ") == 5


def test_every_problem_of_an_import_is_named():
    tensors = specs(directory(QWEN3_MOE))
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    tensors["model.norm.weight"] = Spec("float32", (13,))
    tensors["model.layers.0.extra"] = Spec("float32", (1,))
    text = problems(lambda: import_targets(tensors, QWEN3_MOE))
    assert "model.layers.1.mlp.experts.2.up_proj.weight [6, 12] is missing" in text
    assert "model.norm.weight has shape [13], config.json asks for [12]" in text
    assert "model.layers.0.extra: no rule of qwen3_moe has this tensor" in text
    assert text.count("\n  - ") == 3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("heads", "is_head"),
    [({"score.weight": (1, 12)}, True), ({"classifier.weight": (5, 12), "classifier.bias": (5,)}, True),
     ({"qa_outputs.weight": (2, 12), "qa_outputs.bias": (2,)}, True),
     ({"v_head.summary.weight": (1, 12), "v_head.summary.bias": (1,)}, True),
     ({"reward_head.0.weight": (30, 12), "reward_head.2.weight": (1, 30)}, True),
     ({"model.layers.0.score.weight": (1, 12)}, False), ({"projector.weight": (12, 5)}, False)],
)  # fmt: skip
def test_the_head_of_another_model_is_named(heads, is_head, tied):
    """Beside the head of a language model (TRL), or in its place."""
    config = {**LLAMA, "tie_word_embeddings": tied, "architectures": ["RewardModel"]}
    tensors = {**specs(directory(config)), **{name: Spec("float32", shape) for name, shape in heads.items()}}
    for _ in range(2):
        text = problems(lambda: import_targets(tensors, config))
        assert all(name in text for name in heads)
        assert (
            "head of a reward, value or classification model (architectures: ['RewardModel'])" in text
        ) is is_head
        assert ("lm_head.weight [11, 12] is missing" in text) is not (
            is_head or tied or "lm_head.weight" in tensors
        )
        tensors.pop("lm_head.weight", None)


def test_vocabulary_is_padded_with_zeros_and_cut_again():
    tensors = directory(LLAMA)
    found, megatron = imported(LLAMA, tensors, multiple=8)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert megatron[name].shape == (16, 12)
        assert not megatron[name][11:].any() and megatron[name][:11].any()
    assert found.args["padded_vocab_size"] == 16 and found.args["vocab_size"] == 11
    exported = export_targets(specs(megatron), found.args)
    assert exported.config["vocab_size"] == 11
    assert "cut from 16 to 11" in exported.notes[0]
    args = {**found.args, "vocab_size": None}
    whole = export_targets(specs(megatron), args)
    assert whole.config["vocab_size"] == 16 and "not known" in whole.notes[0]
    assert export_targets(specs(megatron), args, LLAMA).config["vocab_size"] == 11
    assert export_targets(specs(megatron), args, vocab_size=12).config["vocab_size"] == 12
    assert export_targets(specs(megatron), args, {**LLAMA, "vocab_size": 20}).config["vocab_size"] == 16
    assert "fewer than" in problems(lambda: export_targets(specs(megatron), args, vocab_size=17))


@pytest.mark.parametrize(
    ("kind", "centred", "offset"), [("gemma", False, -1.0), ("gemma", True, 0), ("llama", True, 1.0)]
)
def test_norms_are_offset_by_the_convention(kind, centred, offset):
    """Gemma computes 1 + w. Megatron stores w with zero-centred gamma, 1 + w without."""
    config = {**LLAMA, "model_type": kind}
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    args = {**found.args, "layernorm_zero_centered_gamma": centred, "apply_layernorm_1p": centred}
    stored = {key: array - np.float32(offset) if "norm" in key else array for key, array in megatron.items()}
    made, again = exported(stored, args)
    assert made.offsets == dict.fromkeys([key for key in again if "norm" in key and offset], offset)
    for key, array in tensors.items():
        np.testing.assert_allclose(again[key], array, atol=2e-7)  # x + 1 - 1 is not the identity in float32


def test_local_layer_spec_names_are_accepted():
    tensors = directory(QWEN3_MOE)
    found, megatron = imported(QWEN3_MOE, tensors)
    renamed = {
        key.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight").replace(
            "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
        ): array
        for key, array in megatron.items()
    }
    assert renamed.keys() != megatron.keys()
    assert_same(exported(renamed, found.args)[1], tensors)


@pytest.mark.parametrize(
    ("config", "embedding", "head"),
    [({**LLAMA, "tie_word_embeddings": True}, "model.embed_tokens.weight", "lm_head.weight"),
     (config_of("gpt_neox_tanh"), "gpt_neox.embed_in.weight", "embed_out.weight")],
)  # fmt: skip
def test_tied_head_is_not_written_and_a_stored_one_is_to_be_proven_equal(config, embedding, head):
    tensors = directory(config)
    assert head not in tensors and head in directory({**config, "tie_word_embeddings": False})
    found, megatron = imported(config, {**tensors, head: tensors[embedding]})
    assert found.equal == ((embedding, head),) and "output_layer.weight" not in megatron
    stored = {**megatron, "output_layer.weight": megatron["embedding.word_embeddings.weight"]}
    made = export_targets(specs(stored), found.args, config)
    assert made.equal == (("embedding.word_embeddings.weight", "output_layer.weight"),)
    assert {one.key for one in made.tensors} == tensors.keys() and made.config["tie_word_embeddings"] is True


@pytest.mark.parametrize("config", [DEEPSEEK, GLM], ids=lambda config: config["model_type"])
def test_prediction_layers_with_copies(config):
    """MTP layer i is layer L + i; the releases repeat embedding and head there, Megatron does not store them."""
    tensors, count = directory(config), config["num_nextn_predict_layers"]
    assert {
        "model.layers.2.eh_proj.weight",
        f"model.layers.{count + 1}.shared_head.norm.weight",
    } < tensors.keys()
    copies = {}
    for layer in range(2, 2 + count):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        copies[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"]
    found, megatron = imported(config, {**tensors, **copies})
    assert {name for _, name in found.equal} == copies.keys() == set(found.dropped)
    assert "mtp.layers.0.transformer_layer.mlp.experts.experts.2.linear_fc1.weight" in megatron
    assert found.args["mtp_num_layers"] == count
    plain, again = exported(megatron, found.args)
    assert_same(again, tensors)
    assert plain.config["num_nextn_predict_layers"] == count
    whole = export_targets(specs(megatron), found.args, mtp_copies=True)
    assert_same(materialise(whole.tensors, megatron), {**tensors, **copies})
    found, _ = imported(
        config, {k: v for k, v in tensors.items() if ".layers.2." not in k and ".layers.3." not in k}
    )
    assert found.args["mtp_num_layers"] is None
    assert any("prediction layers" in note for note in found.notes)


@pytest.mark.parametrize(
    ("variant", "prefix", "masks"),
    [("gpt2", "transformer.", {f"h.{i}.attn.bias" for i in range(2)}),
     ("gpt_neox_tanh", "gpt_neox.", {"layers.0.attention.masked_bias"})],
)  # fmt: skip
def test_directories_saved_from_a_bare_model_and_masks_are_read(variant, prefix, masks):
    """The released `gpt2` spells its names without `transformer.` and stores its causal masks."""
    config = config_of(variant)
    tensors = directory(config)
    buffers = {name: np.zeros((1, 1, 9, 9), np.float32) for name in masks}
    found, megatron = imported(config, {**{k.removeprefix(prefix): v for k, v in tensors.items()}, **buffers})
    assert set(found.dropped) == masks
    assert_same(megatron, imported(config, tensors)[1])


def test_weights_that_cannot_become_one_are_refused():
    tensors = specs(directory(QWEN3_MOE))
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = Spec("bfloat16", (6, 12))
    assert "become one parameter" in problems(lambda: import_targets(tensors, QWEN3_MOE))
    with pytest.raises(UnsupportedCheckpointError, match=r"quantized \(fp8\)"):
        import_targets({}, {**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    config = {"model_type": "llava", "text_config": LLAMA, "vision_config": {}}
    text = problems(lambda: family_of_config(config))
    assert (
        "'llava', a model of several parts" in text and "its language model is a llama (text_config)" in text
    )


def test_deepseek_v3_has_the_tensors_of_its_release():
    """Megatron-Bridge #5790 counted the released model: 46,183 tensors, 684,489,845,504 values, copies included."""
    config = {
        **DEEPSEEK, "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8,
        "topk_group": 4, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    family = family_of_config(config)
    model = replace(read_config(family, config), padded_vocab_size=129280)
    shapes = {
        key: Spec("bfloat16", shape.shape)
        for pair in expand(family, model)
        for key, shape in zip(pair.hf, pair.tensors, strict=True)
    }
    found = import_targets(shapes, config)
    parameters = {target.key: Spec(target.dtype, target.shape) for target in found.tensors}
    exported = export_targets(parameters, found.args, mtp_copies=True)
    assert len(exported.tensors) == 46_183
    assert sum(math.prod(target.shape) for target in exported.tensors) == 684_489_845_504


@pytest.mark.parametrize(
    ("prefix", "drop", "why"),
    [("base_model.model.", "", "peft's: merge its adapters"), ("module.", "", "a parallel wrapper's"),
     ("_orig_mod.", "", "torch.compile's"), ("language_model.", "", "the language model in a model of several parts"),
     ("model.language_model.", "model.", "the language model in a model of several parts"),
     ("student.", "", "that of a model which has this one inside")],
)  # fmt: skip
def test_a_prefix_before_all_names_is_named(prefix, drop, why):
    """In place of a list in which everything is missing; a tensor that is missing indeed is listed as ever."""
    plain = directory(LLAMA)
    wrapped = {prefix + name.removeprefix(drop): array for name, array in plain.items()}
    text = problems(lambda: imported(LLAMA, wrapped))
    assert f"have the prefix {prefix!r}" in text and why in text and "missing" not in text
    beside = {name: array for name, array in wrapped.items() if not name.endswith("lm_head.weight")}
    assert f"{prefix!r}" in problems(
        lambda: imported(LLAMA, {**beside, "lm_head.weight": plain["lm_head.weight"]})
    )
    assert "lm_head.weight [11, 12] is missing" in problems(lambda: imported(LLAMA, beside))


def test_expert_biases_are_float32_and_it_is_said():
    """Megatron keeps them so, and so does the class; releases such as Moonlight's have them in bfloat16."""
    tensors = specs(directory(DEEPSEEK))
    biases = [key for key in tensors if key.endswith("e_score_correction_bias")]
    text = "are bfloat16 in the source and written as float32, the type that both programs hold them in"
    found = import_targets({key: one._replace(dtype="bfloat16") for key, one in tensors.items()}, DEEPSEEK)
    assert f"{len(biases)} tensors, {biases[0]} the first, {text}" in found.notes
    parameters = {one.key: Spec(one.dtype, one.shape) for one in found.tensors}
    core = [key for key in parameters if key.endswith("router.expert_bias")]
    assert {key for key, one in parameters.items() if one.dtype == "float32"} == set(core)
    assert len(core) == len(biases) == 3
    for plain in (import_targets(tensors, DEEPSEEK), export_targets(parameters, found.args)):
        assert not any("written as" in note for note in plain.notes)
    halves = {key: one._replace(dtype="bfloat16") for key, one in parameters.items()}
    made = export_targets(halves, found.args, dtype="float16")
    assert f"3 tensors, {core[0]} the first, {text}" in made.notes and made.config["torch_dtype"] == "float16"
    assert {one.key for one in made.tensors if one.dtype == "float32"} == set(biases)


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2"])
def test_no_shared_expert_is_zero_of_them(kind):
    """transformers multiplies by it: null fails in both majors, 0 computes the same (test_families)."""
    config = {key: value for key, value in DEEPSEEK.items() if key != "num_nextn_predict_layers"}
    config |= {"model_type": kind, "n_shared_experts": 0}
    tensors = specs(directory(config))
    assert not any("shared_experts" in key for key in tensors)
    empty = {"model.layers.1.mlp.shared_experts.gate_proj.weight": Spec("float32", (0, 12))}
    for said, more in ((0, {}), (None, {}), (0, empty)):
        found = import_targets(tensors | more, {**config, "n_shared_experts": said})
        assert found.dropped == tuple(more)
        parameters = {one.key: Spec(one.dtype, one.shape) for one in found.tensors}
        made = export_targets(parameters, found.args)
        assert made.config["n_shared_experts"] == 0 and {one.key for one in made.tensors} == tensors.keys()
        assert any("the model has no shared expert: config.json says 0" in note for note in made.notes)
    found = import_targets(
        specs(directory(config | {"n_shared_experts": 1})), config | {"n_shared_experts": 1}
    )
    parameters = {one.key: Spec(one.dtype, one.shape) for one in found.tensors}
    assert not any("no shared expert" in note for note in export_targets(parameters, found.args).notes)
