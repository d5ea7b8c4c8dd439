"""The whole fault matrix, by hand: `python -m tests.execute.fault_matrix --kills 200`. Prints what was tried.

Whatever fails, a conversion must end in the right result or in one of our errors that names a file or key, and the
next one must get there. A wrong result must at least be seen by `verify --content`, of the source or of the output.
`test_faults.py` tries a sample.
"""

import argparse
import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.errors import CkptError, StorageError
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.formats.locate.detect import TRACKER
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import find_tensor
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.verify.report import VerifyOptions
from tests.damage import ITERATION, copy_of
from tests.execute.conftest import make_case, reopened_case
from tests.execute.converter import PUBLISHED, Converters, Order
from tests.execute.test_run import tree

ERRORS = "open close mkdir rename replace unlink rmdir pwrite write pread preadv ftruncate fsync stat statvfs"
ERRORS += " copy_file_range posix_fallocate"
SHORT = "pwrite write pread preadv copy_file_range"
ONE_THREAD = WriteOptions(threads=1, memory_bytes=3 << 16, fsync=True)  # so that calls have an order
LLAMA = "core019_llama_tp2_fully_reshardable"
Tree = dict[str, str]
Fault = Callable[[Callable[..., Any], Any], Any]


class Faults:
    """Wraps one of os' functions so that its n-th call goes wrong."""

    def __init__(self, real: Callable[..., Any], at: int, fault: Fault) -> None:
        self.real, self.at, self.fault = real, at, fault
        self.calls = itertools.count()

    def __call__(self, *args: Any, **named: Any) -> Any:
        if next(self.calls) == self.at:
            return self.fault(self.real, args)
        return self.real(*args, **named)


def raising(code: int) -> Fault:
    def fault(real: Callable[..., Any], args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fault


def short(real: Callable[..., Any], args: Any) -> Any:
    """The call, but for one byte."""
    first, second, *rest = args
    if real.__name__ == "copy_file_range":
        return real(first, second, 1, *rest[1:])
    if isinstance(second, list | int):
        return real(first, 1 if isinstance(second, int) else [second[0][:1]], *rest)
    return real(first, memoryview(second)[:1], *rest)


def failing_calls(folder: Path, resumed: bool) -> Iterator[tuple[str, Counter[str]]]:
    """ENOSPC, EIO and short counts at every single call of one small conversion, from its start or when resumed."""
    for call in ERRORS.split():
        for code in (errno.ENOSPC, errno.EIO):
            yield f"{call}: {errno.errorcode[code]}", every_call(folder, call, raising(code), resumed)
    for call in SHORT.split():
        yield f"{call}: one byte", every_call(folder, call, short, resumed)


def every_call(
    folder: Path, call: str, fault: Fault, resumed: bool = False, numbers: Iterable[int] = range(10_000)
) -> Counter[str]:
    """How conversions over an old output end when their n-th call fails, for every n of `numbers` that there is."""
    # The kernel copies only what need not be proven.
    options = replace(ONE_THREAD, check_source="none" if call == "copy_file_range" else "all")
    if not (folder / "source").exists():
        make_case(folder / "source", scale=24)
    put_old(folder)
    assert convert(folder, options, overwrite=True) == "done"
    good, ends = tree(folder / "out"), Counter[str]()
    for at in numbers:
        put_old(folder)
        if resumed:
            with in_os("pwrite", 40, raising(errno.EIO)):
                assert convert(folder, options, overwrite=True) == "error"
        with in_os(call, at, fault) as faults:
            end = convert(folder, options, overwrite=True, resume=resumed)
        if next(faults.calls) <= at:
            break
        ends[settle(folder, good, end)] += 1
    return ends


@contextlib.contextmanager
def in_os(call: str, at: int, fault: Fault) -> Iterator[Faults]:
    faults = Faults(getattr(os, call), at, fault)
    with patch.object(os, call, faults):
        yield faults


def put_old(folder: Path) -> None:
    for path in (folder / "out", folder / ".out.ckpt_tools-partial"):
        shutil.rmtree(path, ignore_errors=True)
    (folder / "out").mkdir()
    (folder / "out" / ".metadata").write_text("old")


def convert(folder: Path, options: WriteOptions = ONE_THREAD, **how: Any) -> str:
    files = open_files(str(folder / "source"))
    try:
        plan = reopened_case(folder / "source").plan(2)
        write_checkpoint(plan, files, Output(folder / "out", {"tracker": b"1"}, **how), options)
    except StorageError as error:
        assert str(folder) in str(error), error
        return "error"
    except OSError:
        return "OSError"  # the command line makes our own of it
    finally:
        files.close()
    return "done"


def settle(folder: Path, good: Tree, end: str) -> str:
    """Check what a conversion left, and that the next one gets there."""
    out = folder / "out"
    is_old = {p.name for p in out.iterdir()} == {".metadata"}
    assert is_old or tree(out) == good
    assert end != "done" or not is_old
    assert convert(folder, overwrite=True, resume=True) == "done"
    assert tree(out) == good
    assert not (folder / ".out.ckpt_tools-partial").exists()
    return f"{end}, {'old' if is_old else 'new'} output"


def regions(folder: Path) -> dict[str, list[tuple[str, range]]]:
    """Name of a region -> (file, bytes) of every item of the small source: what stands in it from head to tail."""
    found: dict[str, list[tuple[str, range]]] = {}
    case = reopened_case(folder)
    for tensor in case.catalog.tensors.values():
        for chunk in tensor.chunks:
            item, frame = chunk.item, find_tensor(case.files, chunk.item)
            data = case.files.read(*item[:3])
            payload_end = frame.payload_offset + frame.nbytes
            directory = item.offset + data.index(b"PK\x01\x02")
            cuts = [item.offset, frame.payload_offset, payload_end, directory, item.offset + item.length]
            for name, a, b in zip(
                ("frame head", "payload", "tail", "zip directory"), cuts, cuts[1:], strict=False
            ):
                found.setdefault(name, []).append((item.file, range(a, b)))
    case.files.close()
    return found


def flips(folder: Path, count: int, dice: random.Random) -> Iterator[tuple[str, Counter[str]]]:
    """Bits flipped in every region of the small source."""
    source = folder / "source"
    make_case(source, scale=24)
    convert(folder, overwrite=True)
    good = tree(folder / "out")
    for name, places in regions(source).items():
        ends = Counter[str]()
        for _ in range(count):
            file, place = dice.choice(places)
            bit = 8 * dice.choice(place) + dice.randrange(8)
            ends[flip_source(source / file, bit, folder, good, lambda: convert(folder, overwrite=True))] += 1
        yield f"bit of {name}", ends


def metadata_flips(folder: Path, count: int, dice: random.Random) -> Iterator[tuple[str, Counter[str]]]:
    """Bits flipped in the metadata of a real checkpoint that is converted."""
    root = copy_of(LLAMA, folder)
    options = ConvertOptions(target=TargetOptions(swiglu=True), overwrite=True, write=ONE_THREAD)
    whole = partial(convert_to_fsdp_dtensor, str(root), str(folder / "out"), options)
    whole()
    good = tree(next((folder / "out").glob("iter_*")))
    path = root / ITERATION / ".metadata"
    bits = [dice.randrange(8 * path.stat().st_size) for _ in range(count)]
    yield "bit of .metadata", Counter(flip_source(path, bit, folder, good, whole) for bit in bits)


def flip_source(path: Path, bit: int, folder: Path, good: Tree, convert: Callable[[], object]) -> str:
    data = path.read_bytes()
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    end = damaged(path, folder, good, convert)
    if end.startswith("WRONG"):
        print(f"  {path.name} bit {bit}: {end}", flush=True)
    path.write_bytes(data)
    return end


def damaged(path: Path, folder: Path, good: Tree, convert: Callable[[], object]) -> str:
    """How a conversion of a damaged source ends; a wrong result is a failure unless `verify --content` sees it."""
    try:
        convert()
    except CkptError as error:
        named = path.name in str(error) or "." in str(error)
        return f"error ({type(error).__name__})" if named else "error without a name"
    out = next((folder / "out").glob("iter_*"), folder / "out")
    if tree(out) == good:
        return "right result"
    for where, checked in (("output", out), ("source", path.parent)):
        try:
            found = verify_checkpoint(str(checked), None, VerifyOptions(content=True, threads=1)).findings
        except CkptError:
            return f"seen by verify of the {where}"
        if any(one.severity == "error" and one.check != "values" for one in found):  # random values have NaN
            return f"seen by verify --content of the {where}"
    return "WRONG result"


_LAST_CALLS = (
    8  # aimed at, counted back from the end: all that is done after publication, and what is before it
)


class Killed:
    """An output that converters are killed at, one after another, and what must be true of it after each."""

    def __init__(self, converters: Converters, folder: Path, world: int) -> None:
        make_case(folder / "source", scale=24)
        self._folder, self._converters = folder, converters
        self._order = Order(str(folder), world=world, killed_at="-1", overwrite=True, resume=True)
        self._out, self._partial = folder / "out", folder / ".out.ckpt_tools-partial"
        self._good: Tree | None = None
        self.finish()
        self._good = tree(self._out)

    def calls(self, rank: int) -> list[int]:
        """How many calls of the system a rank made in the last run to its end: all, and after publication."""
        return list(map(int, (self._folder / f"calls{rank}").read_text().split()))

    def kill(self, at: str, victim: int, has_old: bool, goes_on: bool) -> Counter[str]:
        """Kill one converter at its `at`-th call; how it ended, what it left, and how one went on from there."""
        shutil.rmtree(self._out, ignore_errors=True)
        if has_old:
            self._out.mkdir()
            (self._out / ".metadata").write_text("old")
        tracker = self._folder / TRACKER
        tracker.write_text("old")
        status = self._converters.run(replace(self._order, killed_at=at, victim=victim))[victim].status
        assert status in (-signal.SIGKILL, 0), status  # 0: going on took fewer calls than from the start
        is_old = not self._out.exists() or {p.name for p in self._out.iterdir()} == {".metadata"}
        assert is_old or tree(self._out) == self._good
        tracked = tracker.read_text()
        assert tracked in ("old", "7"), "whole, whenever it is read"
        assert tracked == "old" or not is_old, "the tracker names what is not there"
        ends = Counter(["not reached" if status == 0 else "old" if is_old else "new"])
        if goes_on or not is_old:
            says_so = (self._partial / "publishing").exists()
            read, resumed = self.finish()
            if says_so and not is_old:
                assert read == 0, "what was published is written again"
                ends["found published"] += 1
            elif is_old and resumed:
                ends["went on from finished items"] += 1
        return ends

    def finish(self) -> tuple[int, int]:
        """Let a converter run to its end: the bytes that it read, and the items that it found finished."""
        ends = self._converters.run(self._order)
        assert all(end.status == 0 for end in ends), ends
        assert self._good is None or tree(self._out) == self._good
        assert (self._folder / TRACKER).read_text() == "7"
        assert not self._partial.exists()
        return ends[0].bytes_read, ends[0].resumed


def kill_anywhere(
    converters: Converters, folder: Path, kills: int, world: int, aim: str = ""
) -> Counter[str]:
    """How many converters killed at calls of the system left what: the old state, or the whole new one.

    Rank 0 is killed at its first call, at its first after publication, then at its last calls; then random ranks at
    random calls, or, with `aim` "mid", in the middle of writing. Half of them go on afterwards; others leave their
    remains to the next.
    """
    dice, ends = random.Random(7), Counter[str]()
    state = Killed(converters, folder, world)
    whole, after = state.calls(0)  # going on takes fewer
    back = range(1, min(kills // 2, _LAST_CALLS))
    aimed = ["0", f"{PUBLISHED}0"]
    aimed += [f"{PUBLISHED}{after - n}" if n < after else str(whole - n) for n in back]
    for number in range(kills):
        victim = 0
        if aim == "" and number < len(aimed):
            at = aimed[number]
        else:
            victim = dice.randrange(world)
            calls, _ = state.calls(victim)
            last = min(dice.choice([calls, 40, 12]), calls)
            at = str(
                dice.randrange(calls // 8, calls * 7 // 8)
                if aim == "mid"
                else calls - 1 - dice.randrange(last)
            )
        ends += state.kill(at, victim, has_old=dice.random() < 0.7, goes_on=dice.random() < 0.5)
    state.finish()
    return ends


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--flips", type=int, default=300, help="in each region")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="sections whose name has this in it")
    chosen = options.parse_args()
    dice = random.Random(chosen.seed)
    wrong, converters = 0, Converters()

    def kills(folder: Path) -> Iterator[tuple[str, Counter[str]]]:
        for number, (world, aim) in enumerate(itertools.product((1, 2), ("", "mid"))):
            place = folder / str(number)
            yield (
                f"{world} process(es) {aim}",
                kill_anywhere(converters, place, chosen.kills // 4, world, aim),
            )

    sections: dict[str, Callable[[Path], Iterator[tuple[str, Counter[str]]]]] = {
        "kills": kills,
        "failing calls": partial(failing_calls, resumed=False),
        "failing calls, resumed": partial(failing_calls, resumed=True),
        "flips": lambda folder: flips(folder, chosen.flips, dice),
        "metadata flips": lambda folder: metadata_flips(folder, chosen.flips, dice),
    }
    for name, section in sections.items():
        if chosen.only in name:
            print(f"{name}:", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                for what, ends in section(Path(folder)):
                    listed = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
                    print(f"  {what:<28}{sum(ends.values()):>6}: {listed}", flush=True)
                    wrong += ends["WRONG result"] + ends["error without a name"]
    converters.close()
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
