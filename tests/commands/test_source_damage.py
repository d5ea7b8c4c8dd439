"""One flipped bit anywhere in what a command reads ends it with exit code 4, and nothing is published."""

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools import (
    AverageOptions,
    ConvertOptions,
    EditOptions,
    ExportOptions,
    Layout,
    Topology,
    ToTorchDistOptions,
    average_checkpoints,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
    export_hf,
    import_hf,
    load_dtensors,
    modify_state_dict,
    slice_layers,
    strip_checkpoint,
)
from ckpt_tools.cli.reports import source_checksums
from ckpt_tools.commands.job import conversion
from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.locate.detect import locate
from ckpt_tools.formats.safetensors import read_safetensors_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import find_tensor, record_stretches
from tests.commands.launched import one_rank
from tests.conftest import NATIVE, fixture_dir
from tests.damage import flip_bit
from tests.folders import content

NONE = WriteOptions(check_source="none")
UNREAD = WriteOptions(check_source="unread")
Command = Callable[[str, str, WriteOptions], Any]


def to_fsdp(layout: Layout | None = None) -> Command:
    return lambda source, output, write: convert_to_fsdp_dtensor(
        source, output, ConvertOptions(layout=layout, check_masters="none", write=write)
    )


def back(source: str, output: str, write: WriteOptions) -> Any:
    return convert_to_torch_dist(source, output, ToTorchDistOptions(write=write))


def exported(source: str, output: str, write: WriteOptions) -> Any:
    return export_hf(source, output, ExportOptions(write=write))


def sliced(source: str, output: str, write: WriteOptions) -> Any:
    return slice_layers(source, output, "0:1", None, EditOptions(write=write))


def modified(source: str, output: str, write: WriteOptions) -> Any:
    return modify_state_dict(source, output, ["rename decoder dec"], EditOptions(write=write))


def stripped(source: str, output: str, write: WriteOptions) -> Any:
    return strip_checkpoint(source, output, None, EditOptions(write=write))


def averaged(fixture: str, place: int) -> Command:
    """A mean with the fixture itself, of which the checkpoint that may be damaged is the first or the last."""

    def average(source: str, output: str, write: WriteOptions) -> Any:
        sources = [str(fixture_dir(fixture))] * 2
        sources[place] = source
        return average_checkpoints(sources, output, AverageOptions(write=write)).report

    return average


NATURAL, BUCKETS = "core019_llama_tp2_fully_reshardable", "core019_llama_tp2_dp_reshardable"
SHARDED = Layout("mfsdp-v1", Topology(dp_shard=4))
COMMANDS: dict[str, tuple[str, Command]] = {
    "natural": (NATURAL, to_fsdp()),
    "natural, for a topology": (NATURAL, to_fsdp(SHARDED)),
    "buckets": (BUCKETS, to_fsdp()),
    "buckets, for a topology": (BUCKETS, to_fsdp(SHARDED)),
    "flattened": ("v015_dense_ms_tp2_dp2", to_fsdp()),
    "buckets in objects": ("v013_dense_dpzero_tp2_dp2", to_fsdp()),
    "relayout": (NATIVE, to_fsdp(SHARDED)),
    "way back": (NATIVE, back),
    "export": (NATURAL, exported),
    "slice": (NATURAL, sliced),
    "modify": (NATURAL, modified),
    "strip": (NATURAL, stripped),
    "strip, of buckets": (BUCKETS, stripped),
    "average, first": (NATURAL, averaged(NATURAL, 0)),
    "average, last": (NATURAL, averaged(NATURAL, 1)),
    "average, buckets": (BUCKETS, averaged(BUCKETS, 0)),
    "average, native": (NATIVE, averaged(NATIVE, 0)),
}


def copy_of(fixture: str, folder: Path) -> Path:
    found = fixture_dir(fixture)
    shutil.copytree(found / "checkpoint" if (found / "checkpoint").is_dir() else found, folder)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def payloads(source: Path) -> list[tuple[str, Path, int, int]]:
    """(key, file, offset, bytes) of every stored payload with a checksum that is not empty."""
    location = locate(str(source))
    files = open_files(location.path)
    found = []
    for key, entry in read_catalog(files).tensors.items():
        for chunk in entry.chunks:
            frame = find_tensor(files, chunk.item)
            if frame.crc32 is not None and frame.nbytes:
                place = Path(location.path, chunk.item.file)
                found.append((key, place, frame.payload_offset, frame.nbytes))
    for key, stored in read_catalog(files).objects.items():
        for start, nbytes, _ in record_stretches(files, stored.item) if "param_state" in key else ():
            if nbytes > 100:
                found.append((key, Path(location.path, stored.item.file), start, nbytes))
    files.close()
    return found


def assert_named(text: str, key: str, path: Path, offset: int, nbytes: int) -> None:
    """Key, file and place of a damaged payload, or record of an object, are told."""
    if "/param_state" in key:
        assert "param_state" in text
    else:
        assert text.startswith((f"{key}: ", f"{key} of {path.parent}: "))
    assert path.name in text
    if "record '" in text:
        assert f"of {nbytes} bytes has CRC-32" in text
    else:
        assert "has another checksum than its archive says" in text
        assert f"bytes {offset}..{offset + nbytes} " in text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, name):
    fixture, command = COMMANDS[name]
    source, out = copy_of(fixture, tmp_path / "in"), tmp_path / "out"
    written = command(str(source), str(out), WriteOptions()).written
    assert re.fullmatch(r"\d+ checksums of the source \([\d.]+ [KM]iB\)", source_checksums(written))
    good = content(out)
    shutil.rmtree(out)
    rng = random.Random(name)
    stored = payloads(source)
    unread = 0
    for key, path, offset, nbytes in rng.sample(stored, min(4, len(stored))):
        at, bit = offset + rng.randrange(nbytes), rng.randrange(8)
        flip_bit(path, at, bit)
        try:
            command(str(source), str(out), WriteOptions())
        except CorruptCheckpointError as error:
            assert error.exit_code == 4
            assert_named(str(error), key, path, offset, nbytes)
            assert not content(out)  # at most the empty root of a run
        else:
            assert content(out) == good  # nothing of this payload is in the output
            unread += 1
        shutil.rmtree(out, ignore_errors=True)
        flip_bit(path, at, bit)
    assert unread < min(4, len(stored))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("natural", NONE, "the source was not checked (--check-source none)"),
        ("buckets, for a topology", NONE, "the source was not checked (--check-source none)"),
        (
            "way back",
            UNREAD,
            "nothing; parts of tensors have no checksum in the output (--check-source unread)",
        ),
    ],
)
def test_unproven_only_if_asked_for(tmp_path, name, options, says):
    fixture, command = COMMANDS[name]
    source, out = copy_of(fixture, tmp_path / "in"), tmp_path / "out"
    weights = [p for p in payloads(source) if "exp_avg" in p[0]]
    _, path, offset, nbytes = weights[len(weights) // 2]
    flip_bit(path, offset + nbytes // 2)
    report = command(str(source), str(out), options)
    assert source_checksums(report.written) == says
    assert report.written.check_source == options.check_source
    assert (report.written.payloads_proven, report.written.bytes_read_to_prove) == (0, 0)


@pytest.mark.parametrize(("fixture", "part"), [(NATURAL, "linear_qkv.weight"), (BUCKETS, "param")])
def test_masters_that_do_not_round_since_a_bit_has_changed_are_called_damaged(tmp_path, fixture, part):
    source = copy_of(fixture, tmp_path / "in")
    found = [p for p in payloads(source) if p[0].endswith(part) and "exp_avg" not in p[0]]
    key, path, offset, nbytes = found[0]
    flip_bit(path, offset + nbytes // 2 // 4 * 4 + 3, bit=6)
    with pytest.raises(CorruptCheckpointError, match="has another checksum than its archive says") as error:
        convert_to_fsdp_dtensor(source, tmp_path / "out", ConvertOptions(check_masters="all"))
    assert key in str(error.value)
    if fixture == BUCKETS:
        return  # an export does without masters that cannot be told apart, and says so
    with pytest.raises(CorruptCheckpointError, match="has another checksum than its archive says") as error:
        export_hf(source, tmp_path / "hf", ExportOptions(dtype="float32"))
    assert key in str(error.value) and not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "command",
    [
        to_fsdp(),
        exported,
        sliced,
        modified,
        stripped,
        averaged("core016_llama_tp2_fully_reshardable", 0),
        averaged("core016_llama_tp2_fully_reshardable", 1),
    ],
    ids=["convert", "export", "slice", "modify", "strip", "average, first", "average, last"],
)
def test_a_flipped_bit_of_common_state_is_found(tmp_path, command):
    source = copy_of("core016_llama_tp2_fully_reshardable", tmp_path / "in")
    path = next(source.rglob("common.pt"))
    data = path.read_bytes()
    place = data.index(b"max_lr") if b"max_lr" in data else data.index(b"data.pkl") + 200
    flip_bit(path, place + len(b"max_lr") + 6)
    with pytest.raises(CorruptCheckpointError, match=r"common\.pt at byte 0: record .* has CRC-32"):
        command(str(source), str(tmp_path / "out"), WriteOptions())
    assert not content(tmp_path / "out")


def test_a_flipped_bit_of_an_object_that_is_taken_over_is_found(tmp_path):
    """Archives that nobody unpickles, as rng states, are copied as they are, and proven first."""
    source = copy_of(NATURAL, tmp_path / "in")
    location = locate(str(source))
    files = open_files(location.path)
    key, entry = next((k, e) for k, e in read_catalog(files).objects.items() if "rng" in k)
    archive = files.read(entry.item.file, entry.item.offset, entry.item.length)
    path = Path(location.path, entry.item.file)
    flip_bit(path, entry.item.offset + archive.index(b"data.pkl") + 300)
    for command in (sliced, modified, averaged(NATURAL, 1)):
        with pytest.raises(CorruptCheckpointError, match=r"record .*data\.pkl.* has CRC-32"):
            command(str(source), str(tmp_path / "out"), WriteOptions())
        assert not content(tmp_path / "out"), key


def test_safetensors_carry_no_checksums_which_is_said(tmp_path):
    export_hf(fixture_dir(NATURAL), tmp_path / "hf")
    report = import_hf(tmp_path / "hf", tmp_path / "run")
    written = report.written
    assert written is not None
    assert (written.payloads_proven, written.bytes_proven) == (0, 0)
    assert (
        source_checksums(written)
        == f"{written.payloads_without_checksum} tensors of the source have no checksum"
    )
    assert written.payloads_without_checksum == len(read_safetensors_catalog(str(tmp_path / "hf")).tensors)


def test_a_rank_proves_what_it_reads_whole(tmp_path):
    source = copy_of(NATIVE, tmp_path / "in")
    key, path, offset, nbytes = next(p for p in payloads(source) if "exp_avg" in p[0])
    flip_bit(path, offset + nbytes // 2)
    with one_rank() as mesh:
        load_dtensors(source, mesh, options=ConvertOptions(write=NONE))
        with pytest.raises(CorruptCheckpointError) as caught:
            load_dtensors(source, mesh)
    assert str(caught.value).startswith(f"{key}: the payload of the item at byte ")


def replaced(file: Path) -> None:
    """Another file of the same name, content and times."""
    copy = file.with_name("copy")
    shutil.copy2(file, copy)
    copy.rename(file)


def rewritten(file: Path) -> None:
    """The same file, of the same length and modification time."""
    status = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [replaced, rewritten, Path.unlink])
@pytest.mark.parametrize("name", [".metadata", "common.pt"])
@pytest.mark.parametrize(
    ("room", "step"), [(conversion.Prepared, "planned"), (conversion, "rehearse")], ids=["plan", "rehearse"]
)
def test_a_source_that_is_described_anew_meanwhile_is_a_mix(name, change, room, step, tmp_path, monkeypatch):
    """What describes a checkpoint is read first: it may change before and after a plan was made of it."""
    source = Path(shutil.copytree(fixture_dir("core016_llama_tp2_fully_reshardable"), tmp_path / "source"))
    (folder,) = source.glob("iter_*")
    real = getattr(room, step)

    def changing(*args: object, **named: object) -> object:
        change(folder / name)
        return real(*args, **named)

    monkeypatch.setattr(room, step, changing)
    with pytest.raises(CorruptCheckpointError, match=f"{re.escape(name)}.* changed while the conversion ran"):
        to_fsdp()(str(source), str(tmp_path / "out"), WriteOptions())
    assert not list(tmp_path.glob("out/iter_*"))
