"""What lies beside the weights of a Hugging Face model, and which of it goes along with them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.formats.locate.owned_files import CARRIED, TEMPLATES, is_like
from ckpt_tools.formats.locate.run_layouts import snapshot_of
from ckpt_tools.formats.safetensors import OTHER_WEIGHTS, refuse_pointers
from ckpt_tools.formats.storage.files import path_in, read_whole
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.untrusted_documents import DocumentError, parse_json

CODE = "*.py"
MAX_ASSET_BYTES = 1 << 30  # the largest tokenizers have some tens of megabytes
_OWN = (
    "config.json",
    ".*",
    "*.safetensors",
    "*.safetensors.index.json",
    *(f"*{end}" for end in OTHER_WEIGHTS),
)


class Assets(NamedTuple):
    """Files to write beside a model, and the names of those that are left where they are."""

    files: dict[str, bytes]
    left: tuple[str, ...]


def read_assets(folder: str | Path, *, has_code: bool) -> Assets:
    """Tokenizer, templates, processors, generation settings and licence, byte for byte.

    Python files belong to the model if it `has_code`, or if a tokenizer or processor says that its class is in one.
    """
    place = snapshot_of(str(folder))
    with closing(open_files(place)) as files:
        names = files.list()
        wanted = [name for name in names if is_like(name, CARRIED) and not is_like(name, (CODE, *_OWN))]
        refuse_pointers(files, wanted)  # the hub keeps large tokenizers as it keeps weights
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
    return Assets(found, tuple(left))


def documents_of(names: Iterable[str]) -> list[str]:
    """Those of `names` that are JSON and go along with a model."""
    return [name for name in names if name.endswith(".json") and is_like(name, CARRIED)]


def _names_code(name: str, data: bytes) -> bool:
    """Whether settings say that a class is in a file beside them (`trust_remote_code`)."""
    if not name.endswith("_config.json"):
        return False
    try:
        return "auto_map" in parse_json(data)
    except (DocumentError, TypeError):  # carried as it is; whoever loads it will say
        return False
