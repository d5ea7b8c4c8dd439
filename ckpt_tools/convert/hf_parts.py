"""What exports and imports share: the Hugging Face side's small files, and proofs that need tensor bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.box import Box
from ckpt_tools.catalog.documents import parse_json
from ckpt_tools.catalog.files import Files, open_files, read_whole
from ckpt_tools.catalog.model import Catalog
from ckpt_tools.errors import CkptError, MappingError, UnsupportedCheckpointError, list_problems
from ckpt_tools.execute.casts import cast
from ckpt_tools.execute.read_box import BoxReader, read_proven
from ckpt_tools.megatron.huggingface.families import FAMILIES
from ckpt_tools.megatron.huggingface.rulefile import load_rule_file
from ckpt_tools.megatron.huggingface.rules import Family
from ckpt_tools.megatron.rebase import Base
from ckpt_tools.megatron.target import TargetTensor
from ckpt_tools.plan.byte_runs import row_major_tiles

CONFIG = "config.json"
ASSETS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
          "generation_config.json", "LICENSE")  # fmt: skip
ASSET_PATTERNS = ("*.tiktoken",)
MAX_ASSET_BYTES = 1 << 30  # the largest tokenizers have some tens of megabytes
TILE_ELEMS = 1 << 22


def families_with(rules: Path | None) -> Mapping[str, Family]:
    """The known families, and that of the user's rule file in front of them."""
    if rules is None:
        return FAMILIES
    own = load_rule_file(rules)
    return {own.name: own, **{name: family for name, family in FAMILIES.items() if name != own.name}}


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory.

    Raises:
        UnsupportedCheckpointError: there is none, or it is no JSON object.
    """
    path = f"{str(folder).rstrip('/')}/{CONFIG}"
    try:
        with closing(open_files(str(folder))) as files:
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
    with closing(open_files(str(folder))) as files:
        names = [name for name in files.list() if any(fnmatchcase(name, pattern) for pattern in patterns)]
        return {name: read_whole(files, name, MAX_ASSET_BYTES) for name in names}


def prove_equal(
    files: Files, catalog: Catalog, bases: Mapping[str, Base], pairs: Iterable[tuple[str, str]]
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
            + list_problems(problems)
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
    shifted = cast(exact + np.float32(offset), "float32", tensor.dtype)
    back = cast(shifted, tensor.dtype, "float32") - np.float32(offset)
    return shifted.tobytes(), int((back != exact).sum())
