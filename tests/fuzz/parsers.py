"""What is fuzzed: every parser of foreign bytes as a function of them, and real inputs to start from.

A parser returns whether it took the input. Any exception but our own, a broken promise of what it took, or a cost out
of bounds is a failure.
"""

import resource
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from ckpt_tools.commands.convert.to_dtensors import load_group_map
from ckpt_tools.errors import CkptError, CorruptCheckpointError
from ckpt_tools.execute.move.source_reader import ChunkRef, SourceReader
from ckpt_tools.formats.dcp import metadata_read as dcp
from ckpt_tools.formats.safetensors import (
    INDEX_FILE,
    read_safetensors_catalog,
    read_safetensors_header,
)
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.torch_archive.item_reader import find_tensor, load_object, outline_object
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.formats.torch_archive.tensor_template import framed_tensor
from ckpt_tools.megatron.keys import strip_wrappers
from ckpt_tools.megatron.param_groups import merge_map
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog, Item, ObjectEntry, TensorEntry
from tests.conftest import DATA, LLAMA, fixture_dir
from tests.fuzz import settings

MAX_SECONDS = 2.0  # of CPU, for one input
MAX_GROWTH = 256 << 20  # bytes of resident memory, by one input
NAME = "input"


class OneFile(LocalFiles):
    """A folder in memory that holds one file, under whatever name it is asked for."""

    def __init__(self, data: bytes) -> None:
        super().__init__("memory")
        self._data = data

    def exists(self, name: str) -> bool:
        return True

    def size(self, name: str) -> int:
        return len(self._data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        part = self._data[offset : offset + len(buffer)]
        if offset < 0 or len(part) != len(buffer):
            raise CorruptCheckpointError(f"{name} ends before {offset + len(buffer)}")
        buffer[:] = part


def _metadata(data: bytes) -> None:
    with patch.object(dcp, "EAGER_BYTES", 0):  # what is decoded on look-up must be as safe
        catalog = dcp.read_catalog(OneFile(data))
    for entries in (catalog.tensors, catalog.objects):
        for key in entries:
            with suppress(CkptError):
                _check_entry(key, entries[key])


def _check_entry(key: str, entry: TensorEntry | ObjectEntry) -> None:
    assert entry.key == key
    items = [entry.item] if isinstance(entry, ObjectEntry) else [chunk.item for chunk in entry.chunks]
    for item in items:
        assert ".." not in item.file.split("/")
        assert not item.file.startswith("/")
        assert item.offset >= 0 < item.length
    if isinstance(entry, TensorEntry):
        whole = full_box(entry.shape)
        assert entry.nbytes >= 0
        assert all(whole.contains(chunk.box) for chunk in entry.chunks if chunk.box.volume)


def _object(data: bytes) -> None:
    files, item = OneFile(data), Item(NAME, 0, len(data))
    with suppress(CkptError):
        outline_object(files, item)
    load_object(files, item)


def _frame(data: bytes) -> None:
    """The frame, which the engine's shortcut must see alike."""
    files, item = OneFile(data), Item(NAME, 0, len(data))
    frame = find_tensor(files, item)
    assert 0 <= frame.payload_offset <= frame.payload_offset + frame.nbytes <= len(data)
    if frame.is_row_major:
        payload = SourceReader(files).payload(ChunkRef("key", item, frame.dtype, frame.shape))
        assert (payload.offset, payload.nbytes) == (frame.payload_offset, frame.nbytes)
        assert payload.crc32 == frame.crc32


def _map(data: bytes) -> None:
    """JSON as a group map, and as the index of a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, INDEX_FILE)
        path.write_bytes(data)
        with suppress(CkptError):
            read_safetensors_catalog(folder)
        found = load_group_map(path)
    merge_map(None, found, [strip_wrappers(name) for name in found], [{}] * 9, strict=False)


def _safetensors(data: bytes) -> None:
    with suppress(CkptError):
        _check_catalog(read_safetensors_header(OneFile(data), NAME), len(data))
    with_length = (
        len(data).to_bytes(8, "little") + data
    )  # the JSON alone, so that mutations need not keep count
    _check_catalog(read_safetensors_header(OneFile(with_length), NAME), len(with_length))


def _check_catalog(tensors: dict[str, TensorEntry], size: int) -> None:
    catalog = Catalog("memory", tensors, {})
    for entry in catalog.tensors.values():
        item = entry.chunks[0].item
        assert 0 <= item.offset <= item.offset + item.length <= size
        assert item.length == entry.nbytes


PARSERS: dict[str, Callable[[bytes], None]] = {
    "metadata": _metadata,
    "object": _object,
    "frame": _frame,
    "map": _map,
    "safetensors": _safetensors,
    **settings.PARSERS,
}


def parse(parser: str, data: bytes) -> bool:
    """Whether the parser takes the input.

    Raises:
        AssertionError: it breaks a promise, or costs too much.
        Exception: whatever else it should not have raised.
    """
    began, before = time.process_time(), _peak()
    try:
        PARSERS[parser](data)
        taken = True
    except CkptError:
        taken = False
    seconds, growth = time.process_time() - began, _peak() - before
    assert seconds < MAX_SECONDS, f"{seconds:.1f} s for {len(data)} bytes"
    assert growth < MAX_GROWTH, f"{growth >> 20} MiB for {len(data)} bytes"
    return taken


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seeds(parser: str) -> list[bytes]:
    """Inputs to start from: small real ones, and the hostile corpus where it fits."""
    return list(_seeds(parser))


def _seeds(parser: str) -> Iterable[bytes]:
    if parser in settings.PARSERS:
        yield from settings.seeds(parser)
    elif parser == "metadata":
        paths = [*sorted(DATA.glob("hostile/*.metadata")), *_in_runs(".metadata")]
        yield from (path.read_bytes() for path in paths if path.stat().st_size < 1 << 16)
    elif parser == "object":
        yield from (path.read_bytes() for path in sorted(DATA.glob("hostile/*.pt")))
        yield from _items(objects=True)
        yield dump_archive({"a": [1, 2.5, None, {3: (True, "x")}], "b": {"c": b"bytes", "d": {1, 2}}})
    elif parser == "frame":
        yield from _items(objects=False)
        yield from (
            framed_tensor(dtype, (2, 3), bytes(6 * n)) for dtype, n in (("float32", 4), ("uint16", 2))
        )
    elif parser == "map":
        yield from (path.read_bytes() for path in _in_runs("param_to_param_group_map.json"))
        yield b'{"metadata": {"total_size": 4}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}'
    else:
        header = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        header += b'"b":{"dtype":"BF16","shape":[0,2],"data_offsets":[4,4]}}'
        yield len(header).to_bytes(8, "little") + header + bytes(4)
        yield header


def _in_runs(file: str) -> list[Path]:
    """The files of that name in real checkpoints: of a dense model, of experts, and of Megatron-FSDP."""
    names = (LLAMA, "core019_llama_tp2_native_fsdp_dtensor", "core019_moe_ep2_fully_reshardable")
    return [path for name in names for path in sorted(fixture_dir(name).rglob(file))]


def _items(objects: bool) -> Iterable[bytes]:
    """Small real items, a few of each checkpoint."""
    for path in _in_runs(".metadata"):
        files = LocalFiles(str(path.parent))
        catalog = dcp.read_catalog(files)
        items = [entry.item for entry in catalog.objects.values()]
        if not objects:
            items = [tensor.chunks[0].item for tensor in catalog.tensors.values()]
        small = [item for item in items if item.length < 4096]
        yield from (files.read(*item[:3]) for item in small[:: max(1, len(small) // 3)])
        files.close()
