"""Directories of tiny vision-language models without transformers: random tensors under the names of the files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.mapping.rules import expand
from ckpt_tools.megatron.huggingface.vision.vision_language import tower_pairs, vision_language
from tests.megatron.huggingface.by_rules import Arrays
from tests.megatron.huggingface.models import BASE, HEAD, MOE

TEXT = {**BASE, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "torch_dtype": "float32",
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}  # fmt: skip
QWEN2_5 = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
           "image_token_id": 95, "vision_config": {"depth": 1}, **TEXT}  # fmt: skip
MOE_TEXT = {
    **BASE,
    **HEAD,
    **MOE,
    "model_type": "qwen3_vl_moe_text",
    "rope_theta": 5e5,
    "norm_topk_prob": True,
}
QWEN3_MOE = {"model_type": "qwen3_vl_moe", "vision_config": {"depth": 1}, "tie_word_embeddings": False,
             "text_config": MOE_TEXT}  # fmt: skip
AS_MODULES = ("model.language_model.", "model.visual.")
AS_FILES = ("model.", "visual.")
INSIDE = ("language_model.model.", "visual.")


def language_tensors(family: str, text: dict[str, Any], seed: int = 0) -> Arrays:
    """The language model's tensors under the names of a separate model."""
    plain = {key: value for key, value in text.items() if key not in ("rope_scaling", "rope_parameters")}
    model, random = read_config(FAMILIES[family], plain), np.random.default_rng(seed)
    return {
        key: random.normal(size=shape.shape).astype(np.float32)
        for pair in expand(FAMILIES[family], replace(model, padded_vocab_size=model.vocab_size))
        for key, shape in zip(pair.hf, pair.tensors, strict=True)
    }


def whole(language: Arrays, names: tuple[str, str] = AS_FILES, seed: int = 0) -> Arrays:
    """All tensors, those of the vision tower with values of another type."""
    random = np.random.default_rng(100 + seed)
    shapes = {"patch_embed.proj.weight": (16, 3, 2, 4, 4), "merger.ln_q.weight": (16,)}
    head = "language_model.lm_head.weight" if names == INSIDE else "lm_head.weight"
    named = {
        head if key == "lm_head.weight" else names[0] + key.removeprefix("model."): array
        for key, array in language.items()
    }
    return named | {
        names[1] + key: random.normal(size=shape).astype(np.float16) for key, shape in shapes.items()
    }


def save(folder: Path, config: dict[str, Any], tensors: Arrays) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def qwen2_5_vl(folder: Path, names: tuple[str, str] = AS_FILES, seed: int = 0) -> Path:
    """A Qwen2.5-VL with the flat config.json of the released ones."""
    return save(folder, QWEN2_5, whole(language_tensors("qwen2_5_vl_text", TEXT, seed), names, seed))


VISUAL = {"depth": 2, "hidden_size": 16, "intermediate_size": 20, "patch_size": 4, "out_hidden_size": 24}
SIGLIP = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "patch_size": 4,
    "image_size": 16,
}
DEEP = {**VISUAL, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
PLAIN = {**BASE, **HEAD, "rope_theta": 5e5, "torch_dtype": "float32", "tie_word_embeddings": False}
MROPE = {"rope_type": "default", "mrope_section": [2, 2, 1], "mrope_interleaved": True}
GEMMA = {**PLAIN, "query_pre_attn_scalar": 10, "sliding_window": 8, "sliding_window_pattern": 2,
         "rope_local_base_freq": 1e4, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
SILENT_MOE = {
    key: value for key, value in {**MOE_TEXT, "rope_scaling": MROPE}.items() if key != "norm_topk_prob"
}
# By model_type: family and spelling of the language model, text_config, vision_config, further fields.
KINDS: dict[str, tuple[str, tuple[str, str], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl_text", AS_FILES, TEXT, VISUAL, {}),
    "qwen3_vl": ("qwen3_vl_text", AS_MODULES, {**PLAIN, "rope_scaling": MROPE}, DEEP, {}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", AS_MODULES, SILENT_MOE, DEEP, {}),
    "gemma3": ("gemma3", INSIDE, {**GEMMA, "model_type": "gemma3_text"}, SIGLIP, {"tie_word_embeddings": True}),
    "mistral3": ("mistral", INSIDE, {**PLAIN, "model_type": "mistral"}, SIGLIP, {"multimodal_projector_bias": True}),
}  # fmt: skip


def directory(folder: Path, name: str) -> Path:
    """A whole model of random values, under the names of the released files."""
    family, names, text, vision, fields = KINDS[name]
    kind, random = vision_language(name), np.random.default_rng(7)
    config = {"model_type": name, "tie_word_embeddings": False, "vision_config": vision, **fields}
    config |= TEXT if kind.flat else {"text_config": {"model_type": kind.language, **text}}
    head = "language_model.lm_head.weight" if names is INSIDE else "lm_head.weight"
    language = {
        head if key == "lm_head.weight" else names[0] + key.removeprefix("model."): array
        for key, array in language_tensors(family, text).items()
    }
    others = {
        key: random.normal(size=shape.shape).astype(np.float32)
        for pair in tower_pairs(kind, config, text, ())
        for key, shape in zip(pair.hf, pair.tensors, strict=True)
    }
    return save(folder, config, {**language, **others})
