"""The elements that descriptions show, by numpy and `push_piece` alone: what an engine must write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.model.box import full_box
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import chunk_piece, push_piece, view_shape

Arrays = Mapping[str, np.ndarray[Any, Any]]
ELEMENTS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16, "float64": np.float64}


def specs(arrays: Arrays) -> dict[str, Spec]:
    """Type and shape of every array; uint16 stands for the bits of bfloat16."""
    names = {np.dtype(kind): name for name, kind in ELEMENTS.items()}
    return {key: Spec(names[array.dtype], array.shape) for key, array in arrays.items()}


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
