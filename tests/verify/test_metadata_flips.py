"""`.metadata` with single bits flipped, judged by stock torch: what it cannot load is never called valid."""

import os
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.errors import CkptError
from tests.conftest import LLAMA, MOE, NATIVE
from tests.damage import ITERATION, copy_of, errors_of, metadata_of

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is:UserWarning")
FLIPS = int(os.environ.get("CKPT_TOOLS_FLIPS", "50"))  # of each file; more by hand
WITH_PLANS = "main_moe_fr_ep2"  # all_local_plans: what every rank wrote


def stock_load(folder):
    """Every tensor as stock torch loads it: {key: (dtype, shape, bytes)}."""
    metadata = FileSystemReader(folder).read_metadata()
    state = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return {
        k: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for k, t in state.items()
    }


def complaint_of_stock(folder, good):
    """Why stock torch does not load what it loaded before, None when it does."""
    try:
        return None if stock_load(folder) == good else "other values"
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a C++ error of torch is no Exception
        return f"{type(error).__name__}: {error}"


def is_valid(folder):
    try:
        return verify_checkpoint(str(folder)).is_valid
    except CkptError:
        return False


def copied(name, tmp_path):
    """The folder of a writable copy that holds `.metadata`."""
    root = copy_of(name, tmp_path)
    return root / ("checkpoint" if name == WITH_PLANS else ITERATION)


def refused(folder, variants):
    """How many other contents of `.metadata` are not valid; what stock torch cannot load must be among them."""
    path, good, count = folder / ".metadata", stock_load(folder), 0
    data = path.read_bytes()
    assert is_valid(folder)
    for at, value in variants:
        damaged = bytearray(data)
        damaged[at] = value
        path.write_bytes(damaged)
        if is_valid(folder):
            assert complaint_of_stock(folder, good) is None, (at, value)
        else:
            count += 1
    return count


def flips(data, positions):
    """(place, byte with one bit flipped) for each (place, bit)."""
    return [(at, data[at] ^ 1 << bit) for at, bit in positions]


@pytest.mark.parametrize("name", [LLAMA, NATIVE, MOE, "tf2_dcp", WITH_PLANS])
def test_what_stock_torch_cannot_load_is_not_valid(name, tmp_path):
    folder, bits = copied(name, tmp_path), random.Random(name)
    data = (folder / ".metadata").read_bytes()
    drawn = (divmod(bits.randrange(8 * len(data)), 8) for _ in range(FLIPS))
    assert refused(folder, flips(data, drawn)) > FLIPS / 2


# Single flips that were once taken for sound: what stands there, which byte of it, and which bit.
WRONG = {
    "a frame longer than the file": (b"\x80\x04\x95", 5, 7),
    "a pickle protocol of the future": (b"\x80\x04\x95", 1, 3),
    "a module that torch has not": (b"checkpoint.metadata", 12, 2),
    "a class that torch has not": (b"_StorageInfo", 3, 1),
    "chunks in a dict": (b"]\x94h", 0, 5),
    "attributes appended to a dict": (b"\x94R\x94ub", 3, 4),
    "planner data of another key": (b"planner_data", 0, 0),
}


@pytest.mark.parametrize("what", WRONG)
def test_flips_that_were_laundered(what, tmp_path):
    folder = copied(NATIVE, tmp_path)
    path = folder / ".metadata"
    data = bytearray(path.read_bytes())
    pattern, byte, bit = WRONG[what]
    data[data.index(pattern) + byte] ^= 1 << bit
    path.write_bytes(data)
    assert not is_valid(folder)


def test_properties_and_sizes_of_other_things(tmp_path):
    """Every fetch in the records of a tensor, replaced by a fetch of each other value that is at hand."""
    folder = copied(LLAMA, tmp_path)
    data = (folder / ".metadata").read_bytes()
    first = data.index(b"TensorStorageMetadata")
    fetches = [at for at in range(first, first + 900) if data[at] == 0x68]
    choices = random.Random(5)
    drawn = choices.sample(fetches, min(len(fetches), 24))
    assert refused(folder, [(at + 1, other) for at in drawn for other in choices.sample(range(0x24), 4)]) > 30


def test_save_plans_are_made_as_torch_makes_them(tmp_path):
    """Fetches of write items replaced by fetches of other values: most of them make something else."""
    folder = copied(WITH_PLANS, tmp_path)
    data = (folder / ".metadata").read_bytes()
    places = range(data.index(b"WriteItemType"), len(data) - 3)
    fetches = [at for at in places if data[at] == 0x6A and data[at + 3 : at + 5] == b"\0\0"]
    choices = random.Random(3)
    drawn = [(at + 1, choices.randrange(8)) for at in choices.sample(fetches, 12)]
    assert refused(folder, flips(data, drawn)) > 3


@pytest.mark.parametrize("change", ["renamed", "another path", "left out", "one too many"])
def test_planner_data_fits_the_keys(change, tmp_path):
    """torch's tools that need no model (`dcp_to_torch_save`) put every value where these paths say."""
    root = copy_of(NATIVE, tmp_path)
    key = "model.module.decoder.final_layernorm.weight"
    with metadata_of(root) as metadata:
        paths = metadata.planner_data
        if change == "another path":
            paths[key] = ("model", "module.decoder.final_layernorm.bias")
        elif change == "one too many":
            paths["absent"] = ("absent",)
        else:
            path = paths.pop(key)
            if change == "renamed":
                paths["model.module.decoder.final_layernorm.weighT"] = path
    errors = errors_of(root)
    assert {check for check, _, _ in errors} == {"planner"}
    assert all(where in (key, key[:-1] + "T", "absent") for _, where, _ in errors)


def test_shapes_before_flattening_have_as_many_elements(tmp_path):
    """`mcore_data` of a class that only Megatron has, so it is read and written through placeholders."""
    from ckpt_tools.formats.dcp.metadata_read import read_catalog
    from ckpt_tools.formats.storage.files import LocalFiles
    from ckpt_tools.verify.checkpoint.structure import check_planner

    root = copy_of("v015_dense_ms_tp2_dp2", tmp_path)
    folder = next(root.rglob(".metadata")).parent
    catalog = read_catalog(LocalFiles(str(folder)))
    assert check_planner(catalog).errors == 0
    shapes = catalog.original_shapes
    assert isinstance(shapes, dict)
    key, shape = next(iter(shapes.items()))
    shapes[key] = (*shape, 2)
    shapes["absent"] = (1,)
    assert [f.where for f in check_planner(catalog).findings] == [key, "absent"]


def test_a_checkpoint_id_that_is_no_path(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        metadata.storage_meta.checkpoint_id = {"a": 1}
    assert not is_valid(root)
    raw = pickle.loads((root / ITERATION / ".metadata").read_bytes())
    assert raw.storage_meta.checkpoint_id == {"a": 1}
