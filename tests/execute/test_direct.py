"""Writing past the page cache: the same bytes, nothing but whole aligned blocks, and refusals that say what to do."""

import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.errors import StorageError, UsageError
from ckpt_tools.execute.output.fileio import BLOCK_BYTES, check_direct
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.model.transfers import Plan
from ckpt_tools.model.views import Permute, Source
from ckpt_tools.plan.build import WeightFile, build_plan, build_safetensors_plan
from tests.execute.conftest import make_case
from tests.execute.fault_matrix import Faults, raising
from tests.execute.test_faults import finished_but_unpublished
from tests.execute.test_run import small_source, tree
from tests.plan.test_build import rows
from tests.strategies import tilings
from tests.synthetic import DcpFolder

SMALL = WriteOptions(threads=2, memory_bytes=6 << 16, direct=True)
Write = Callable[[int, Any, int], int]


@pytest.fixture(autouse=True)
def _needs_o_direct(tmp_path: Path) -> None:
    try:
        check_direct(tmp_path)
    except StorageError as error:
        pytest.skip(f"{error}")


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


class Checked:
    """`os.pwrite` that refuses what some device would: direct writes that are not of whole blocks."""

    def __init__(self) -> None:
        self.real: Write = os.pwrite
        self.direct = 0  # bytes

    def __call__(self, fd: int, data: Any, offset: int) -> int:
        if is_direct(fd):
            address = np.frombuffer(data, np.uint8).ctypes.data
            assert not address % BLOCK_BYTES and not len(data) % BLOCK_BYTES and not offset % BLOCK_BYTES
            self.direct += len(data)
        return self.real(fd, data, offset)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checked]:
    wrapped = Checked()
    monkeypatch.setattr(os, "pwrite", wrapped)
    yield wrapped
    assert wrapped.direct


def both_ways(plan: Plan, source: Path, folder: Path, options: WriteOptions, is_dcp: bool = True) -> None:
    """Convert with and without the cache; the results must be equal."""
    files = open_files(str(source))
    write_checkpoint(plan, files, Output(folder / "cached", is_dcp=is_dcp))
    report = write_checkpoint(plan, files, Output(folder / "direct", is_dcp=is_dcp), options)
    assert report.bytes_kernel_copied == report.bytes_cloned == 0
    assert tree(folder / "direct") == tree(folder / "cached")


@settings(max_examples=20)
@given(data=st.data())
def test_any_chunks_at_any_offset(data, tmp_path_factory):
    """Items that begin and end anywhere in a block, copied, gathered, transposed, cast or joined."""
    folder = tmp_path_factory.mktemp("any")
    source, targets = DcpFolder(folder / "source"), []
    rng = np.random.default_rng(3)
    for name, (dtype, wanted) in {
        "a": ("float32", "float32"),
        "b": ("float32", "bfloat16"),
        "c": ("uint8", "uint8"),
        "d": ("float64", "float64"),
    }.items():
        shape = data.draw(st.tuples(st.integers(1, 400), st.integers(1, 300)), name)
        values = rng.integers(0, 100, shape).astype(dtype)
        source.tensor(name, dtype, values, data.draw(tilings(shape)))
        view = (Permute((1, 0)),) if data.draw(st.booleans()) else ()
        shape = shape[::-1] if view else shape
        targets.append(TargetTensor(name, wanted, shape, (Source(name, view),)))
    source.finish()
    catalog = read_catalog(open_files(str(folder / "source")))
    world = data.draw(st.integers(1, 3))
    plan = build_plan(catalog, Target(tuple(targets)), rows(world), world)
    with mock.patch.object(os, "pwrite", Checked()):
        threads = data.draw(st.integers(1, 3))
        both_ways(plan, folder / "source", folder, WriteOptions(threads, threads * (3 << 16), direct=True))


def test_every_strategy_small_items_and_bare_payloads(tmp_path, checked):
    """Items of safetensors follow each other without a gap."""
    case = make_case(tmp_path / "source", scale=24)
    bare = build_safetensors_plan(case.catalog, [WeightFile("x.safetensors", case.target.tensors)], {})
    target, _ = small_source(tmp_path / "small", 300)
    small = build_plan(read_catalog(open_files(str(tmp_path / "small"))), target, rows(2), 2)
    for name, source, plan in (
        ("all", "source", case.plan(3)),
        ("small", "small", small),
        ("bare", "source", bare),
    ):
        both_ways(plan, tmp_path / source, tmp_path / f"of {name}", SMALL, is_dcp=name != "bare")


@pytest.mark.parametrize("most", [1000, 3 * BLOCK_BYTES + 17])
def test_short_counts_are_continued(tmp_path, monkeypatch, checked, most):
    """Also after a count that ends inside a block, whose rest then goes through the cache."""
    case = make_case(tmp_path / "source", scale=8)
    shorts = itertools.count()

    def short(fd: int, data: Any, offset: int) -> int:
        count = checked(fd, data, offset)
        if not is_direct(fd) or count <= most:
            return count
        next(shorts)
        other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        checked.real(other, bytes(count - most), offset + most)  # it has not been written after all
        os.close(other)
        return most

    monkeypatch.setattr(os, "pwrite", short)
    both_ways(case.plan(2), tmp_path / "source", tmp_path, SMALL)
    assert next(shorts) > 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EINVAL])
def test_a_failing_write_is_named_and_resumed(tmp_path, monkeypatch, checked, code):
    case = make_case(tmp_path / "source", scale=24)
    plan, out = case.plan(2), tmp_path / "out"
    faults = Faults(checked.real, 5, raising(code))

    def failing(fd: int, data: Any, offset: int) -> int:
        return faults(fd, data, offset) if is_direct(fd) else checked.real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(StorageError, match=rf"distcp: {os.strerror(code)}"):
            write_checkpoint(plan, case.files, Output(out), SMALL)
    assert not out.exists()
    write_checkpoint(plan, case.files, Output(out, resume=True), SMALL)
    write_checkpoint(plan, case.files, Output(tmp_path / "good"))
    assert tree(out) == tree(tmp_path / "good")


@pytest.mark.parametrize("call", ["open", "pwrite"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_file_system_that_refuses(case, tmp_path, monkeypatch, call, begun):
    """Nothing is left of a conversion that has not begun, nothing is lost of one that has."""
    out = tmp_path / "out"
    if begun:
        finished_but_unpublished(case, out, monkeypatch)
    real = getattr(os, call)

    def refuse(first: Any, second: Any, *rest: Any, **named: Any) -> Any:
        if second & os.O_DIRECT if call == "open" else is_direct(first):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(first, second, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StorageError, match=rf"^{tmp_path}.* with --direct: Invalid argument"):
            write_checkpoint(case.plan(2), case.files, Output(out, resume=begun), SMALL)
    names = [".out.ckpt_tools-partial", "source"] if begun else ["source"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    if begun:
        report = write_checkpoint(case.plan(2), case.files, Output(out, resume=True))
        assert report.items_resumed == len(case.plan(2).items)


def test_an_object_store_refuses(case):
    with pytest.raises(UsageError, match=r"--direct is for files; memory://x"):
        write_checkpoint(case.plan(1), case.files, Output("memory://x"), SMALL)
