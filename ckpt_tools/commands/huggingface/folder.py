"""The files of a Hugging Face directory: config.json, tokenizer and the like, weight files and their index.

And what is odd about tensors in it: those that carry nothing, with other axes, shared, or with an offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.errors import CkptError, MappingError, UnsupportedCheckpointError, UsageError, raise_if
from ckpt_tools.execute.move.read_box import BoxReader, read_proven
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.locate.owned_files import CARRIED, TEMPLATES, is_like
from ckpt_tools.formats.locate.run_layouts import snapshot_of
from ckpt_tools.formats.storage.files import Files, path_in, read_whole
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.untrusted_documents import DocumentError, parse_json
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, load_rule_file
from ckpt_tools.megatron.huggingface.mapping.rules import Family
from ckpt_tools.model.box import Box, full_box, split_axes
from ckpt_tools.model.catalog import Catalog, TensorEntry, Value, made_entry
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.kernels.casts import cast, cast_checked, numpy_dtype, raw_dtype
from ckpt_tools.model.kernels.kernel import reshaped
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.plan.build import WeightFile
from ckpt_tools.plan.byte_runs import row_major_tiles

CONFIG = "config.json"
CODE = "*.py"
MAX_ASSET_BYTES = 1 << 30  # the largest tokenizers have some tens of megabytes
_OWN = (
    "config.json",
    ".*",
    "*.safetensors",
    "*.safetensors.index.json",
    *(f"*{end}" for end in safetensors.OTHER_WEIGHTS),
)
_IS_TOKENIZER = re.compile(r"tokenizer|tekken|vocab|spiece|sentencepiece|.*\.(?:tiktoken|spm|model)$")
DEFAULT_SHARD_SIZE = 5 * 10**9


def families_with(rules: Path | None, config: Mapping[str, Any] | None = None) -> Mapping[str, Family]:
    """The families that a model may be of: with --rules, only the family in that file."""
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
            safetensors.refuse_pointers(files, [CONFIG])
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
        if not safetensors.parts_of_ranks(held):
            return [WeightFile(name, held[name]) for name in sorted(held)], {}
    return packed_files(targets, DEFAULT_SHARD_SIZE)


def packed_files(
    tensors: Sequence[TargetTensor | InlineTensor], max_bytes: int
) -> tuple[list[WeightFile], dict[str, bytes]]:
    """Tensors in files of at most `max_bytes`, and the index of several."""
    by_key = {one.key: one for one in tensors}
    sizes = {key: prod(one.shape) * itemsize(one.dtype) for key, one in by_key.items()}
    shards = pack_shards(sizes.items(), max_bytes)
    files = [WeightFile(shard.file, [by_key[key] for key in shard.keys]) for shard in shards]
    return files, {safetensors.INDEX_FILE: as_json(shard_index(shards, sizes))} if len(shards) > 1 else {}


def as_json(value: object) -> bytes:
    """A JSON file, as transformers writes them."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def unread_notes(files: Files) -> tuple[str, ...]:
    """A note on weight files that the index does not name."""
    unread = safetensors.unread_files(files)
    if not unread:
        return ()
    return (f"not in the index and not read: {', '.join(unread[:8])}{', ...' if len(unread) > 8 else ''}",)


def read_assets(folder: str | Path, *, has_code: bool) -> tuple[dict[str, bytes], list[str]]:
    """Tokenizer, templates, processors, generation settings and licence, byte for byte; and names of the rest.

    Python files belong to the model if it `has_code`, or if a tokenizer or processor says that its class is in one.
    """
    place = snapshot_of(str(folder))
    with closing(open_files(place)) as files:
        names = files.list()
        wanted = [name for name in names if is_like(name, CARRIED) and not is_like(name, (CODE, *_OWN))]
        safetensors.refuse_pointers(files, wanted)  # the hub keeps large tokenizers as it keeps weights
        found = {name: read_whole(files, name, MAX_ASSET_BYTES) for name in wanted}
        if has_code or any(_names_code(name, data) for name, data in found.items()):
            found |= {
                name: read_whole(files, name, MAX_ASSET_BYTES) for name in names if is_like(name, (CODE,))
            }
    if TEMPLATES in names:
        with closing(open_files(path_in(place, TEMPLATES))) as files:
            inside = [name for name in files.list() if name.endswith(".jinja")]
            found |= {f"{TEMPLATES}/{name}": read_whole(files, name, MAX_ASSET_BYTES) for name in inside}
    left = [name for name in names if name not in {*found, TEMPLATES} and not is_like(name, _OWN)]
    return found, left


def documents_of(names: Iterable[str]) -> list[str]:
    """Those of `names` that are JSON and go along with a model."""
    return [name for name in names if name.endswith(".json") and is_like(name, CARRIED)]


def _names_code(name: str, data: bytes) -> bool:
    """Whether settings say that a class is in a file of the folder (`trust_remote_code`)."""
    if not name.endswith("_config.json"):
        return False
    try:
        return "auto_map" in parse_json(data)
    except (DocumentError, TypeError):  # copied unchanged; the program that loads it reports it
        return False


def hf_directory(
    tensors: Sequence[TargetTensor | InlineTensor],
    config: Mapping[str, Any],
    hf_config: str | None,
    max_shard_bytes: int,
) -> tuple[list[WeightFile], dict[str, bytes], tuple[str, ...]]:
    """The directory of `tensors`, with what goes along from the original model in `hf_config`.

    These are weight files, small files by name (tokenizer, config.json and, last, the index of several weight files),
    and notes.
    """
    assets, left = ({}, []) if hf_config is None else read_assets(hf_config, has_code="auto_map" in config)
    files, index = packed_files(tensors, max_shard_bytes)
    notes = []
    if not any(map(_IS_TOKENIZER.match, assets)):
        where = "--hf-config has none" if hf_config else "pass --hf-config DIR to copy one"
        notes.append(f"no tokenizer was written; {where}")
    if left:
        shown = ", ".join(left[:8]) + (", ..." if len(left) > 8 else "")
        notes.append(f"not copied from --hf-config: {shown}")
    return files, {**assets, CONFIG: as_json(config), **index}, tuple(notes)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file and the tensors it holds, in order."""

    file: str
    keys: tuple[str, ...]


def pack_shards(sizes: Iterable[tuple[str, int]], max_bytes: int = DEFAULT_SHARD_SIZE) -> list[Shard]:
    """Tensors (name, bytes) in order, in files of at most `max_bytes` of data; a larger tensor gets its own file.

    The rule is huggingface_hub's `split_state_dict_into_shards_factory`; so are the file names.
    """
    groups: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for key, nbytes in sizes:
        if nbytes > max_bytes:
            groups.append([key])
            continue
        if filled + nbytes > max_bytes:
            groups.append(current)
            current, filled = [], 0
        current.append(key)
        filled += nbytes
    if current:
        groups.append(current)
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(keys))
        for number, keys in enumerate(groups, 1)
    ]


def shard_index(shards: Iterable[Shard], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Content of `model.safetensors.index.json` for shards that were written."""
    weight_map = {key: shard.file for shard in shards for key in shard.keys}
    total = sum(sizes[key] for key in weight_map)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


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
    files: Files,
    catalog: Catalog,
    pairs: Sequence[tuple[str, str]],
    bases: Mapping[str, Value] | None = None,
) -> None:
    """Compare parameters that must repeat each other, a tile at a time; without `bases` these are stored tensors."""
    bases = bases or {name: catalog.tensors[name].value for pair in pairs for name in pair}
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
