"""What exports and imports share: the Hugging Face side's small files, and proofs that need tensor bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.errors import (
    CkptError,
    MappingError,
    UnsupportedCheckpointError,
    UsageError,
    list_problems,
)
from ckpt_tools.execute.move.read_box import BoxReader, read_proven
from ckpt_tools.formats.locate.run_layouts import snapshot_of
from ckpt_tools.formats.safetensors import INDEX_FILE, parts_of_ranks, refuse_pointers, unread_files
from ckpt_tools.formats.storage.files import Files, path_in, read_whole
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.untrusted_documents import parse_json
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.rulefile import load_rule_file
from ckpt_tools.megatron.huggingface.mapping.rules import Family
from ckpt_tools.megatron.huggingface.mapping.shard_files import DEFAULT_SHARD_SIZE, pack_shards, shard_index
from ckpt_tools.model.box import Box, full_box, split_axes
from ckpt_tools.model.catalog import Catalog, TensorEntry, Value, made_entry
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.kernels.casts import cast, cast_checked, numpy_dtype, raw_dtype
from ckpt_tools.model.kernels.kernel import reshaped
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.build import WeightFile
from ckpt_tools.plan.byte_runs import row_major_tiles

CONFIG = "config.json"
TILE_ELEMS = 1 << 22
_ADAPTED = re.compile(
    r"(?:^|\.)(?:base_layer|modules_to_save|original_module|lora_\w+|ia3_l|hada_w\w*|lokr_w\w*|oft_\w+|boft_\w+|"
    r"vera_lambda\w*|adapter|prompt_encoder)(?:\.|$)"
)
_FREQUENCIES = re.compile(r"(?:^|\.)rotary_emb\.(?:original_)?(?:inv_freq|cos_cached|sin_cached)$")
_COMPUTED = "rotary frequencies are computed from config.json, not loaded"


def families_with(rules: Path | None, config: Mapping[str, Any] | None = None) -> Mapping[str, Family]:
    """The families that a model may be of: with a rule file the user's own alone, which it then is."""
    if rules is None:
        return FAMILIES
    own = load_rule_file(rules)
    kind, said = own.model_type or own.name, (config or {}).get("model_type")
    if config is not None and said != kind and said not in own.also_types:
        raise UsageError(
            f"--rules {rules}: its family is of model_type {kind!r}, and config.json says {said!r}: they would not "
            f"be used. If they are for this model, `model_type: {said}` in the file says so"
        )
    return {own.name: own}


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory."""
    folder = snapshot_of(str(folder))
    path = path_in(folder, CONFIG)
    try:
        with closing(open_files(folder)) as files:
            refuse_pointers(files, [CONFIG])
            config = parse_json(read_whole(files, CONFIG))
    except CkptError as error:
        raise UnsupportedCheckpointError(
            f"{path}: no config.json of a Hugging Face model: {error} Put the one of this model there: it says what "
            "the weights are"
        ) from error
    if not isinstance(config, dict):
        raise UnsupportedCheckpointError(f"{path}: expected a JSON object")
    return config


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """What a model calls itself in its config.json, if it does."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def refuse_adapters(names: Iterable[str]) -> None:
    """Nothing, when no tensor belongs to an adapter.

    Raises:
        MappingError: some do, and what the model computes is not in the weights alone.
    """
    found = [name for name in names if _ADAPTED.search(name)]
    if found:
        raise MappingError(
            f"{len(found)} tensors belong to an adapter (LoRA and its kin), not to a model of its own. Merge it "
            "first: `model.merge_and_unload().save_pretrained(DIR)` of peft, then import DIR; base and adapter in "
            "directories of their own are merged by --adapter:\n" + list_problems(found[:4]),
            found[:4],
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


def weight_files(
    catalog: Catalog, targets: Iterable[TargetTensor]
) -> tuple[list[WeightFile], dict[str, bytes]]:
    """The files of a model like the one that `catalog` is of, and their index where it has none.

    A tensor stays in its file; those that ranks have written in parts come together in files of the usual size.
    """
    targets = list(targets)
    if all(len(catalog.tensors[one.key].chunks) == 1 for one in targets):
        held: dict[str, list[TargetTensor]] = {}
        for one in targets:
            held.setdefault(catalog.tensors[one.key].chunks[0].item.file, []).append(one)
        if not parts_of_ranks(held):
            return [WeightFile(name, held[name]) for name in sorted(held)], {}
    sizes = {one.key: prod(one.shape) * itemsize(one.dtype) for one in targets}
    shards, by_key = pack_shards(sizes.items(), DEFAULT_SHARD_SIZE), {one.key: one for one in targets}
    files = [WeightFile(shard.file, [by_key[key] for key in shard.keys]) for shard in shards]
    return files, {INDEX_FILE: as_json(shard_index(shards, sizes))} if len(shards) > 1 else {}


def as_json(value: object) -> bytes:
    """A JSON file, as transformers writes them."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def unread_notes(files: Files) -> tuple[str, ...]:
    """A note on weight files that the index does not name."""
    unread = unread_files(files)
    if not unread:
        return ()
    return (f"not in the index and not read: {', '.join(unread[:8])}{', ...' if len(unread) > 8 else ''}",)


def prove_equal(
    files: Files, catalog: Catalog, bases: Mapping[str, Value], pairs: Iterable[tuple[str, str]]
) -> None:
    """Compare parameters that must repeat each other, a tile at a time."""
    reader = BoxReader(files, catalog)
    problems = []
    try:
        for pair in pairs:
            one, other = (
                TargetTensor(name, bases[name].dtype, bases[name].shape, bases[name].sources) for name in pair
            )
            tile = _first_difference(reader, one, other)
            if tile is not None:
                problems.append(f"{other.key} differs from {one.key} at {tile}")
    finally:
        reader.close()
    if problems:
        raise MappingError(
            "weights that share their values by config.json (tie_word_embeddings, copies in prediction layers) are "
            "stored with different ones:\n" + list_problems(problems),
            problems,
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


def offset_values(files: Files, catalog: Catalog, tensor: TargetTensor, offset: float) -> tuple[bytes, int]:
    """The bytes of `tensor` with `offset` added, and how many of its elements cannot be told from them again.

    The sum is made in float32 and rounded once, to the tensor's type.
    """
    exact = read_proven(files, catalog, replace(tensor, dtype="float32"))
    moved = (exact + np.float32(offset)).view(raw_dtype("float32"))
    bits, _ = cast_checked(moved, "float32", tensor.dtype, tensor.key, (0,) * len(tensor.shape))
    shifted = bits.view(numpy_dtype(tensor.dtype))
    back = cast(shifted, tensor.dtype, "float32") - np.float32(offset)
    return shifted.tobytes(), int((back != exact).sum())


def offset_notes(offsets: Mapping[str, float], changed: Mapping[str, int], elements: int) -> list[str]:
    """What adding a number to norms did to their elements; `changed` counts those that lost bits."""
    if not offsets:
        return []
    note = (
        f"{next(iter(offsets.values())):+g} was added to {len(offsets)} norms in float32 and rounded once: "
    )
    if not changed:
        return [note + "every element can be told from the result"]
    worst = max(changed, key=lambda key: changed[key])
    return [
        f"{note}{sum(changed.values()):,} of {elements:,} elements lost bits, most of them ({changed[worst]:,}) in "
        f"{worst}"
    ]
