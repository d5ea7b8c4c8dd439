"""Copies of real checkpoints, damaged in one known way, and what `verify` says of them."""

import pickle
import shutil
from contextlib import contextmanager
from pathlib import Path

from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.formats.torch_archive.tensor_template import framed_tensor
from ckpt_tools.verify.report import VerifyOptions
from tests.conftest import fixture_dir

ITERATION = "iter_0000002"


def copy_of(name, tmp_path):
    """A writable copy of a fixture's run root."""
    root = tmp_path / name
    shutil.copytree(fixture_dir(name), root)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return root


@contextmanager
def metadata_of(root):
    """The `.metadata` of a copy as torch's own objects; changes are written back."""
    path = root / ITERATION / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    yield metadata
    path.write_bytes(pickle.dumps(metadata))


def infos_of(metadata, key):
    """{chunk offset: (index, storage info)} of a key."""
    return {
        None if index.offset is None else tuple(index.offset): (index, info)
        for index, info in metadata.storage_data.items()
        if index.fqn == key
    }


def drop_key(metadata, key):
    """Remove a tensor or object as if it had never been saved."""
    del metadata.state_dict_metadata[key]
    (metadata.planner_data or {}).pop(key, None)
    for index, _ in list(infos_of(metadata, key).values()):
        del metadata.storage_data[index]


def keys_with(metadata, part):
    found = [key for key in metadata.state_dict_metadata if part in key]
    assert found, f"no key has {part!r} in it"
    return found


def replace_chunk(root, key, offset, dtype, payload):
    """Store other bytes for a chunk, in a sound archive at the end of its file, and point the metadata there."""
    with metadata_of(root) as metadata:
        stored = metadata.state_dict_metadata[key]
        chunk = next(c for c in stored.chunks if tuple(c.offsets) == offset)
        _, info = infos_of(metadata, key)[offset]
        archive = framed_tensor(dtype, tuple(chunk.sizes), payload)
        path = root / ITERATION / info.relative_path
        info.offset, info.length = path.stat().st_size, len(archive)
        with open(path, "ab") as file:
            file.write(archive)


def payload_of(root, key, offset):
    """(path, byte offset, bytes) of the payload of a chunk."""
    from ckpt_tools.formats.dcp.metadata_read import read_catalog
    from ckpt_tools.formats.storage.files import LocalFiles
    from ckpt_tools.formats.torch_archive.item_reader import find_tensor

    files = LocalFiles(str(root / ITERATION))
    chunk = next(c for c in read_catalog(files).tensors[key].chunks if c.box.start == offset)
    frame = find_tensor(files, chunk.item)
    data = files.read(chunk.item.file, frame.payload_offset, frame.nbytes)
    files.close()
    return Path(root, ITERATION, chunk.item.file), frame.payload_offset, data


def flip_bit(path, byte, bit=0):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def findings_of(root, **options):
    """[(severity, check, where, message)] of `verify`."""
    report = verify_checkpoint(str(root), None, VerifyOptions(**options))
    return [(f.severity, f.check, f.where, f.message) for f in report.findings]


def errors_of(root, **options):
    """[(check, where, message)] of the errors."""
    return [found[1:] for found in findings_of(root, **options) if found[0] == "error"]


def only(found, check, where, *parts):
    """One finding, of this check, at this place, whose message has all the parts."""
    ((*_, its_check, its_where, message),) = found
    assert its_check == check and where in its_where, found
    assert all(part in message for part in parts), found
