"""Random directories with the tensors that a family's rules name, imported; and what every test asks of them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.rules import Family, expand
from ckpt_tools.megatron.huggingface.mapping.targets import Exported, Imported, export_targets, import_targets
from ckpt_tools.model.box import full_box
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import chunk_piece, push_piece, view_shape

Arrays = Mapping[str, np.ndarray[Any, Any]]
ELEMENTS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16, "float64": np.float64}


def specs(arrays: Arrays) -> dict[str, Spec]:
    """Type and shape of every array; uint16 stands for the bits of bfloat16."""
    names = {np.dtype(kind): name for name, kind in ELEMENTS.items()}
    return {key: Spec(names[array.dtype], array.shape) for key, array in arrays.items()}


BASE = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 10, "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6, "torch_dtype": "float32"}  # fmt: skip
LLAMA = {**BASE, "model_type": "llama"}
QWEN3_MOE = {**BASE, "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2,
             "moe_intermediate_size": 6, "norm_topk_prob": True}  # fmt: skip
DEEPSEEK = {
    **{k: v for k, v in BASE.items() if k != "head_dim"}, "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
    "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 2, "n_group": 1,
}  # fmt: skip


def directory(
    config: dict[str, Any], seed: int = 0, families: Mapping[str, Family] = FAMILIES, **changes: Any
) -> Arrays:
    """Random tensors under the names and shapes the family's rules give."""
    family = family_of_config(config, families)
    model = read_config(family, config)
    model = replace(model, padded_vocab_size=model.vocab_size, **changes)
    random = np.random.default_rng(seed)
    return {
        key: random.normal(size=shape.shape).astype(np.float32)
        for pair in expand(family, model)
        for key, shape in zip(pair.hf, pair.tensors, strict=True)
    }


def imported(
    config: dict[str, Any], tensors: Arrays, multiple: int = 1, families: Mapping[str, Family] = FAMILIES
) -> tuple[Imported, Arrays]:
    """What an import says of the tensors, and the parameters it makes of them."""
    found = import_targets(specs(tensors), config, vocab_multiple=multiple, families=families)
    return found, materialise(found.tensors, tensors, source_shapes=found.shapes, offsets=found.offsets)


def exported(
    megatron: Arrays,
    args: Mapping[str, Any],
    reference: Mapping[str, Any] | None = None,
    families: Mapping[str, Family] = FAMILIES,
) -> tuple[Exported, Arrays]:
    """What an export says of the parameters, and the tensors it makes of them."""
    made = export_targets(specs(megatron), args, reference, families=families)
    return made, materialise(made.tensors, megatron, target_shapes=made.shapes, offsets=made.offsets)


def problems(call: Any) -> str:
    with pytest.raises(MappingError) as caught:
        call()
    return str(caught.value)


def assert_same(found: Arrays, wanted: Arrays) -> None:
    """The same names and bits."""
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if found[key].tobytes() != wanted[key].tobytes()] == []


def materialise(
    targets: Iterable[TargetTensor],
    sources: Arrays,
    source_shapes: Mapping[str, tuple[int, ...]] | None = None,
    target_shapes: Mapping[str, tuple[int, ...]] | None = None,
    offsets: Mapping[str, float] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Every target's elements; fails unless each is shown exactly once (padding excepted).

    `source_shapes` and `target_shapes` are the `shapes` of `Imported` and `Exported`, `offsets` the latter's.
    """
    made = {}
    for target in targets:
        out = np.zeros(target.shape, ELEMENTS[target.dtype])
        count = np.zeros(target.shape, np.uint8)
        for source in target.sources:
            array = sources[source.key].reshape(
                (source_shapes or {}).get(source.key, sources[source.key].shape)
            )
            assert view_shape(source.view, array.shape) == target.shape, (target.key, source)
            flat = array.reshape(-1)
            for box, offset, strides in push_piece(source.view, chunk_piece(full_box(array.shape))):
                here = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
                index = np.full(box.size, offset)
                for axis, stride in enumerate(strides):
                    steps = np.arange(box.size[axis]) * stride
                    index += steps.reshape([-1 if d == axis else 1 for d in range(len(strides))])
                out[here] = flat[index]
                count[here] += 1
        assert count.max() == 1, target.key
        assert target.zero_filled or count.min() == 1, target.key
        if target.key in (offsets or {}):
            assert target.dtype == "float32", "the test helper adds in float32 only"
            out += np.float32((offsets or {})[target.key])
        made[target.key] = out.reshape((target_shapes or {}).get(target.key, target.shape))
    return made
