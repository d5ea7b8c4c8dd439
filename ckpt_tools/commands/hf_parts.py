"""What exports and imports share: the Hugging Face side's small files, and proofs that need tensor bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.errors import CkptError, MappingError, UnsupportedCheckpointError, list_problems
from ckpt_tools.execute.read_box import BoxReader, read_proven
from ckpt_tools.formats.documents import parse_json
from ckpt_tools.formats.files import Files, open_files, read_whole
from ckpt_tools.formats.hub_cache import snapshot_of
from ckpt_tools.formats.safetensors import refuse_pointers, unread_files
from ckpt_tools.megatron.huggingface.families import FAMILIES, Families
from ckpt_tools.megatron.huggingface.rulefile import load_rule_file
from ckpt_tools.megatron.huggingface.rules import Family
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.casts import cast, cast_checked, numpy_dtype, raw_dtype
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.model.expressions import Value, made_entry
from ckpt_tools.model.kernels import reshaped
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.byte_runs import row_major_tiles

CONFIG = "config.json"
ASSETS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
          "generation_config.json", "LICENSE")  # fmt: skip
ASSET_PATTERNS = ("*.tiktoken", "tiktoken.model", "tekken.json", "spiece.model", "preprocessor_config.json")
MAX_ASSET_BYTES = 1 << 30  # the largest tokenizers have some tens of megabytes
TILE_ELEMS = 1 << 22
_ADAPTED = re.compile(
    r"(?:^|\.)(?:base_layer|modules_to_save|original_module|lora_\w+|ia3_l|hada_w\w*|lokr_w\w*|oft_\w+|boft_\w+|"
    r"vera_lambda\w*|adapter|prompt_encoder)(?:\.|$)"
)
_FREQUENCIES = re.compile(r"(?:^|\.)rotary_emb\.(?:original_)?(?:inv_freq|cos_cached|sin_cached)$")
_COMPUTED = "rotary frequencies are computed from config.json, not loaded"


def families_with(rules: Path | None) -> Mapping[str, Family]:
    """The known families, and that of the user's rule file in front of them."""
    return FAMILIES if rules is None else Families(load_rule_file(rules))


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory.

    Raises:
        UnsupportedCheckpointError: there is none, or it is not a JSON object.
    """
    folder = snapshot_of(str(folder))
    path = f"{folder.rstrip('/')}/{CONFIG}"
    try:
        with closing(open_files(folder)) as files:
            refuse_pointers(files, [CONFIG])
            config = parse_json(read_whole(files, CONFIG))
    except CkptError as error:
        raise UnsupportedCheckpointError(
            f"{path}: no config.json of a Hugging Face model: {error}"
        ) from error
    if not isinstance(config, dict):
        raise UnsupportedCheckpointError(f"{path}: expected a JSON object")
    return config


def read_assets(folder: str | Path, with_code: bool) -> dict[str, bytes]:
    """Tokenizer, generation settings and licence, byte for byte; Python files only `with_code`."""
    patterns = (*ASSETS, *ASSET_PATTERNS, *(("*.py",) if with_code else ()))
    with closing(open_files(snapshot_of(str(folder)))) as files:
        names = [name for name in files.list() if any(fnmatchcase(name, pattern) for pattern in patterns)]
        return {name: read_whole(files, name, MAX_ASSET_BYTES) for name in names}


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
    """A tensor of a model with the axes that views ask for; its one chunk holds the same bytes."""
    if shape == entry.shape:
        return entry
    if entry.made is not None:
        kernel = reshaped(entry.made.kernel, entry.shape, shape)
        return made_entry(entry.key, replace(entry.made, kernel=kernel))
    (chunk,) = entry.chunks
    return replace(entry, shape=shape, chunks=(chunk._replace(box=full_box(shape)),))


def unread_notes(files: Files) -> tuple[str, ...]:
    """A note on weight files that the index does not name."""
    unread = unread_files(files)
    if not unread:
        return ()
    return (f"not in the index and not read: {', '.join(unread[:8])}{', ...' if len(unread) > 8 else ''}",)


def prove_equal(
    files: Files, catalog: Catalog, bases: Mapping[str, Value], pairs: Iterable[tuple[str, str]]
) -> None:
    """Compare parameters that must repeat each other, a tile at a time.

    Raises:
        MappingError: two of them differ; every pair is named with the first difference's tile.
    """
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
            "weights that share their values by config are stored with different ones:\n"
            + list_problems(problems),
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
