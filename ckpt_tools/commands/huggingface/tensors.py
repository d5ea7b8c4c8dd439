"""Tensors of a Hugging Face model: those that carry nothing, with other axes, shared, or with an offset."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from math import prod

import numpy as np

from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, raise_if
from ckpt_tools.execute.move.read_box import BoxReader, read_proven
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.model.box import Box, full_box, split_axes
from ckpt_tools.model.catalog import Catalog, TensorEntry, Value, made_entry
from ckpt_tools.model.kernels.casts import cast, cast_checked, numpy_dtype, raw_dtype
from ckpt_tools.model.kernels.kernel import reshaped
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.byte_runs import row_major_tiles

TILE_ELEMS = 1 << 22
_ADAPTED = re.compile(
    r"(?:^|\.)(?:base_layer|modules_to_save|original_module|lora_\w+|ia3_l|hada_w\w*|lokr_w\w*|oft_\w+|boft_\w+|"
    r"vera_lambda\w*|adapter|prompt_encoder)(?:\.|$)"
)
_FREQUENCIES = re.compile(r"(?:^|\.)rotary_emb\.(?:original_)?(?:inv_freq|cos_cached|sin_cached)$")
_COMPUTED = "rotary frequencies are computed from config.json, not loaded"


def refuse_adapters(names: Iterable[str]) -> None:
    """Raise MappingError if tensors belong to an adapter: the weights alone are not what the model computes."""
    found = [name for name in names if _ADAPTED.search(name)]
    raise_if(
        found[:4],
        MappingError,
        f"{len(found)} tensors belong to an adapter (LoRA or similar), not to a model. Merge it first: "
        "`model.merge_and_unload().save_pretrained(DIR)` of peft, then import DIR; base and adapter in directories "
        "of their own are merged by --adapter",
    )


def without_frequencies(catalog: Catalog) -> tuple[Catalog, tuple[str, ...]]:
    """The catalog without stored rotary frequencies, which older models kept as buffers; and a line for each."""
    gone = [name for name in catalog.tensors if _FREQUENCIES.search(name)]
    kept = {name: entry for name, entry in catalog.tensors.items() if name not in set(gone)}
    return replace(catalog, tensors=kept), tuple(f"{name}: {_COMPUTED}" for name in gone)


def seen_as(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """A tensor of a model with the axes that views ask for; its chunks hold the same bytes."""
    if shape == entry.shape:
        return entry
    if entry.made is not None:
        kernel = reshaped(entry.made.kernel, entry.shape, shape)
        return made_entry(entry.key, replace(entry.made, kernel=kernel))
    if len(entry.chunks) == 1:
        return replace(entry, shape=shape, chunks=(entry.chunks[0]._replace(box=full_box(shape)),))
    chunks = []
    for chunk in entry.chunks:
        box = split_axes(chunk.box, entry.shape, shape)
        if box is None:
            raise UnsupportedCheckpointError(
                f"{entry.key} {list(entry.shape)}: a rank's part, {chunk.box}, is cut across rows or columns that "
                f"belong together (of {list(shape)}). Join the parts first: consolidate_safetensors_files(DIR, OUT, "
                "{name: 1 for each tensor}) of torch.distributed.checkpoint._consolidate_hf_safetensors"
            )
        chunks.append(chunk._replace(box=box))
    return replace(entry, shape=shape, chunks=tuple(chunks))


def prove_equal(
    files: Files, catalog: Catalog, bases: Mapping[str, Value], pairs: Iterable[tuple[str, str]]
) -> None:
    """Compare parameters that must repeat each other, a tile at a time."""
    problems = []
    with closing(BoxReader(files, catalog)) as reader:
        for pair in pairs:
            one, other = (
                TargetTensor(name, bases[name].dtype, bases[name].shape, bases[name].sources) for name in pair
            )
            tile = _first_difference(reader, one, other)
            if tile is not None:
                problems.append(f"{other.key} differs from {one.key} at {tile}")
    raise_if(
        problems,
        MappingError,
        "weights that share their values by config.json (tie_word_embeddings, copies in prediction layers) are "
        "stored with different ones",
    )


def _first_difference(reader: BoxReader, one: TargetTensor, other: TargetTensor) -> Box | None:
    whole = Box((0,) * len(one.shape), one.shape)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return whole
    for tile in row_major_tiles(whole, TILE_ELEMS):
        a, b = reader.read(one, tile), reader.read(other, tile)
        if a.tobytes() != b.tobytes():
            return tile
    return None


def shifted_norms(
    files: Files, catalog: Catalog, tensors: Iterable[TargetTensor], offsets: Mapping[str, float]
) -> tuple[dict[str, bytes], list[str]]:
    """The bytes of the norms that a number of `offsets` is added to, and what rounding did to their elements.

    The sum is made in float32 and rounded once, to the tensor's type. An element is changed
    if the result does not give it back.
    """
    data, changed, elements = dict[str, bytes](), dict[str, int](), 0
    for tensor in tensors:
        if tensor.key not in offsets:
            continue
        offset = np.float32(offsets[tensor.key])
        exact = read_proven(files, catalog, replace(tensor, dtype="float32"))
        moved = (exact + offset).view(raw_dtype("float32"))
        bits, _ = cast_checked(moved, "float32", tensor.dtype, tensor.key, (0,) * len(tensor.shape))
        shifted = bits.view(numpy_dtype(tensor.dtype))
        data[tensor.key] = shifted.tobytes()
        elements += prod(tensor.shape)
        if lost := int((cast(shifted, tensor.dtype, "float32") - offset != exact).sum()):
            changed[tensor.key] = lost
    if not offsets:
        return data, []
    note = (
        f"{next(iter(offsets.values())):+g} was added to {len(offsets)} norms in float32 and rounded once: "
    )
    if not changed:
        return data, [note + "every element can be recovered from the result"]
    worst = max(changed, key=lambda key: changed[key])
    return data, [
        f"{note}{sum(changed.values()):,} of {elements:,} elements lost bits, most of them ({changed[worst]:,}) in "
        f"{worst}"
    ]
