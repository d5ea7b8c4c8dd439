"""Blocks shared with the source: what is cloned, and that time and space alone depend on it."""

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.cli.reports import time_and_shared
from ckpt_tools.errors import CorruptCheckpointError, StorageError
from ckpt_tools.execute.output.fileio import check_direct
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage import crc
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import find_tensor
from ckpt_tools.model.box import Box
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.model.transfers import Plan
from ckpt_tools.model.views import Narrow, Permute, Select, Source
from ckpt_tools.plan.build import build_plan
from tests.damage import flip_bit
from tests.execute.conftest import opened
from tests.execute.test_run import assert_equal, stock_load, tree
from tests.plan.test_build import rows
from tests.synthetic import DcpFolder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BLOCK = 4096
LAYERS, ROWS, COLUMNS = 3, 600, 1024
LAYER = ROWS * COLUMNS * 4  # bytes: 2.3 MiB
ONE_THREAD = WriteOptions(threads=1, memory_bytes=3 << 20)


class Clones:
    """`FICLONERANGE` by copying, as strict as a file system; or refused with an error number."""

    def __init__(self) -> None:
        self.calls = 0
        self.refusal: int | None = None

    def __call__(self, fd: int, request: int, argument: bytes) -> int:
        self.calls += 1
        if self.refusal is not None:
            raise OSError(self.refusal, os.strerror(self.refusal))
        source, start, length, to = struct.unpack("qQQQ", argument)
        assert length and not start % BLOCK and not length % BLOCK and not to % BLOCK
        assert start + length <= os.fstat(source).st_size
        os.pwrite(fd, os.pread(source, length, start), to)
        return 0


@pytest.fixture
def clones(monkeypatch: pytest.MonkeyPatch) -> Clones:
    found = Clones()
    monkeypatch.setattr(fcntl, "ioctl", found)
    return found


@dataclass(frozen=True)
class Case:
    files: Files
    plan: Plan
    expected: dict[str, Array]
    whole: int  # bytes of copies of whole payloads
    cut: int  # and of long parts


def make_case(folder: Path) -> Case:
    """Archives packed back to back, and what is made of them by long copies, whole and cut, and in other ways."""
    numbers = np.random.default_rng(7).standard_normal((LAYERS, ROWS, COLUMNS)).astype(np.float32)
    source = DcpFolder(folder)
    source.tensor("small", "float32", numbers[0, :2])
    source.tensor("stack", "float32", numbers, [Box((n, 0, 0), (1, ROWS, COLUMNS)) for n in range(LAYERS)])
    source.tensor("one", "float32", numbers)
    source.tensor("columns", "float32", numbers[0], [Box((0, n * 512), (ROWS, 512)) for n in range(2)])
    files, catalog = opened(source)
    made: dict[str, tuple[Source, Array]] = {
        "layer": (Source("stack", (Select(0, 1),)), numbers[1]),
        "of one": (Source("one", (Select(0, 1),)), numbers[1]),
        "rows": (Source("one", (Narrow(1, 100, 300),)), numbers[:, 100:400]),
        "small": (Source("small"), numbers[0, :2]),
        "columns": (Source("columns"), numbers[0]),
        "turned": (Source("one", (Permute((0, 2, 1)),)), numbers.transpose(0, 2, 1)),
    }
    tensors = [TargetTensor(key, "float32", values.shape, (of,)) for key, (of, values) in made.items()]
    plan = build_plan(catalog, Target(tuple(tensors)), rows(1), 1)
    expected = {key: values for key, (_, values) in made.items()}
    return Case(files, plan, expected, LAYER, LAYER + LAYERS * 300 * COLUMNS * 4)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path / "source")


@pytest.mark.parametrize("check", ["all", "none", "unread"])
def test_long_copies_are_cloned_and_no_byte_depends_on_it(case, tmp_path, clones, check):
    """As many parts as the plan says lie in their blocks as in the source; their edges are copied."""
    options = replace(ONE_THREAD, check_source=check)
    report = write_checkpoint(case.plan, case.files, Output(tmp_path / "cloned"), options)
    # Tried once, then "layer", "of one" and the three parts of "rows", which lie whole blocks apart on both sides.
    assert clones.calls == 6
    assert 0 < case.whole + case.cut - report.bytes_cloned <= 5 * 2 * BLOCK
    assert_equal(stock_load(tmp_path / "cloned", case.plan), case.expected)
    clones.refusal = errno.EOPNOTSUPP
    other = write_checkpoint(case.plan, case.files, Output(tmp_path / "copied"), options)
    assert other.bytes_cloned == 0
    assert tree(tmp_path / "copied") == tree(tmp_path / "cloned")
    assert (other.payloads_proven, other.bytes_read) == (report.payloads_proven, report.bytes_read)
    again = write_checkpoint(case.plan, case.files, Output(tmp_path / "cloned", resume=True), options)
    assert again.was_there


@pytest.mark.parametrize(("refusal", "calls"), [(errno.EOPNOTSUPP, 2), (errno.EXDEV, 2), (errno.EINVAL, 6)])
def test_file_systems_that_do_not_share_are_asked_once_a_thread(case, tmp_path, clones, refusal, calls):
    """And once before. A file may not be shared for reasons of its own, which says nothing of others."""
    clones.refusal = refusal
    write_checkpoint(case.plan, case.files, Output(tmp_path / "out"), ONE_THREAD)
    assert clones.calls == calls
    assert_equal(stock_load(tmp_path / "out", case.plan), case.expected)


def test_what_passes_by_the_page_cache_is_cloned_too(case, tmp_path, clones):
    try:
        check_direct(tmp_path)
    except StorageError as error:
        pytest.skip(f"{error}")
    report = write_checkpoint(
        case.plan, case.files, Output(tmp_path / "direct"), replace(ONE_THREAD, direct=True)
    )
    assert report.bytes_cloned > case.whole
    clones.refusal = errno.EOPNOTSUPP
    write_checkpoint(case.plan, case.files, Output(tmp_path / "cached"), ONE_THREAD)
    assert tree(tmp_path / "direct") == tree(tmp_path / "cached")


@pytest.mark.parametrize("key", ["stack", "one"])
def test_damage_of_what_is_cloned_is_found(case, tmp_path, clones, key):
    """In a payload that is copied whole, and in what no output needs of one that is cut."""
    entry = read_catalog(case.files).tensors[key]
    stored = find_tensor(case.files, entry.chunks[key == "stack"].item)
    path = Path(case.files.location, entry.chunks[key == "stack"].item.file)
    flip_bit(path, stored.payload_offset + stored.nbytes - 1)
    with pytest.raises(CorruptCheckpointError, match=f"^{key}: the payload of the item at byte "):
        write_checkpoint(case.plan, case.files, Output(tmp_path / "out"), ONE_THREAD)
    assert clones.calls
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_proof_reads_no_byte_twice(case, tmp_path, clones):
    """Sums of cut payloads serve their proof and the new archives, and what nobody needs is read at the end."""
    items = tuple(item for item in case.plan.items if item.key in ("layer", "of one"))
    report = write_checkpoint(
        replace(case.plan, items=items), case.files, Output(tmp_path / "out"), ONE_THREAD
    )
    assert (report.payloads_proven, report.bytes_proven) == (2, LAYER + LAYERS * LAYER)
    assert report.bytes_read + report.bytes_read_to_prove == report.bytes_proven


def test_unread_payloads(case, tmp_path, clones):
    """Whole payloads keep their checksum, and parts of others have none, as torch may write them."""
    options = replace(ONE_THREAD, check_source="unread")
    report = write_checkpoint(case.plan, case.files, Output(tmp_path / "out"), options)
    assert report.bytes_touched < 4.1 * LAYER  # "columns" and "turned"
    out = open_files(str(tmp_path / "out"))
    items = {key: entry.chunks[0].item for key, entry in read_catalog(out).tensors.items()}
    sums = {key: find_tensor(out, item).crc32 for key, item in items.items()}
    assert {key for key, checksum in sums.items() if checksum is None} == {"of one", "rows"}
    assert sums["layer"] == crc.crc32(case.expected["layer"].tobytes())
    assert_equal(stock_load(tmp_path / "out", case.plan), case.expected)
    write_checkpoint(case.plan, case.files, Output(tmp_path / "again"), replace(options, verify_output=True))
    assert tree(tmp_path / "again") == tree(tmp_path / "out")


@pytest.mark.parametrize(
    ("cloned", "says"),
    [(2 << 20, "in 0.50 s"), (3 << 20, "in 0.50 s, 3.0 MiB of it shared with the source")],
)
def test_a_verdict_says_when_most_is_shared(case, tmp_path, cloned, says):
    report = write_checkpoint(case.plan, case.files, Output(tmp_path / "out"), ONE_THREAD)
    report = replace(report, bytes_written=4 << 20, bytes_cloned=cloned, seconds=0.5)
    assert time_and_shared(report) == says
    assert report.in_short()["bytes_cloned"] == cloned


@pytest.fixture(params=["xfs", "btrfs"])
def sharing_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of a file system that shares blocks: of an image, mounted for the test."""
    kind, image, folder = request.param, tmp_path / "image", tmp_path / "mounted"
    if os.geteuid() or not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"no {kind} to mount: only root can, with mkfs.{kind}")
    folder.mkdir()
    image.touch()
    os.truncate(image, 400 << 20)
    subprocess.run([f"mkfs.{kind}", "-q", image], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no {kind} to mount: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def used(folder: Path) -> int:
    os.sync()
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_system_that_shares(sharing_folder, direct):
    """Space is taken for what was not cloned alone, and the source can go."""
    case = make_case(sharing_folder / "source")
    before = used(sharing_folder)
    report = write_checkpoint(
        case.plan, case.files, Output(sharing_folder / "out"), replace(ONE_THREAD, direct=direct)
    )
    assert case.whole + case.cut - report.bytes_cloned <= 5 * 2 * BLOCK
    assert used(sharing_folder) - before <= report.bytes_written - report.bytes_cloned + (2 << 20)
    case.files.close()
    shutil.rmtree(sharing_folder / "source")
    assert_equal(stock_load(sharing_folder / "out", case.plan), case.expected)
