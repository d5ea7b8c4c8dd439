"""Models that every rank wrote its part of: the tensors are those of joined ones, and what is not there is told."""

import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from ckpt_tools.commands.check.diff import diff_checkpoints
from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.commands.edit.average import average_checkpoints
from ckpt_tools.commands.huggingface.import_hf import import_hf
from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError
from ckpt_tools.formats.safetensors import lacking_files, read_safetensors_catalog, what_is_not_told
from ckpt_tools.model.box import Box, split_axes
from ckpt_tools.verify.compare.differences import DiffOptions
from tests.commands.test_huggingface import CONFIGS, model

HEAD = "lm_head.weight"
Cuts = tuple[int, ...]  # parts along each axis
ARRAYS: dict[str, Any] = {
    "matrix": np.arange(35, dtype=np.float32).reshape(7, 5),
    "vector": np.arange(5, dtype=np.float16),
    "scalar": np.array(7, dtype=np.int64),
    "cube": np.arange(60, dtype=np.int32).reshape(4, 3, 5),
}


def parts_of(array: Any, cuts: Cuts) -> Iterator[tuple[list[int], Any]]:
    """A tensor in a grid of parts, as evenly as they come, with where each begins."""
    edges = [[round(n * i / c) for i in range(c + 1)] for n, c in zip(array.shape, cuts, strict=True)]
    for place in product(*(range(c) for c in cuts)):
        box = tuple(slice(edges[d][i], edges[d][i + 1]) for d, i in enumerate(place))
        yield [s.start for s in box], np.array(array[box], order="C")


def write_parts(folder: Path, tensors: dict[str, Any], cuts: dict[str, Cuts], files: int = 2) -> None:
    """As HuggingFaceStorageWriter does it, a rank a part; tensors take turns in the `files` of a rank."""
    folder.mkdir(exist_ok=True)
    held: dict[tuple[int, int], dict[str, Any]] = {}
    places: dict[tuple[int, int], dict[str, Any]] = {}
    for number, (key, array) in enumerate(tensors.items()):
        for rank, (start, part) in enumerate(parts_of(array, cuts.get(key, (1,) * array.ndim)), 1):
            file = rank, number % files + 1
            held.setdefault(file, {})[key] = part
            places.setdefault(file, {})[key] = {"saved_offsets": start}
    for (rank, number), found in held.items():
        texts = {"DCP_SHARDING_INFO": json.dumps(places[rank, number]), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(found, folder / name_of(rank, number, files), metadata=texts)


def name_of(rank: int, number: int, files: int = 2) -> str:
    return f"shard-{rank:05d}-model-{number:05d}-of-{files:05d}.safetensors"


def loaded(folder: Path) -> dict[str, Any]:
    """The tensors that the catalog sees, by the bytes at the places it names."""
    found = {}
    for key, entry in read_safetensors_catalog(folder).tensors.items():
        array = np.zeros(entry.shape, entry.dtype)
        for box, item in entry.chunks:
            raw = (folder / item.file).read_bytes()[item.offset : item.offset + item.length]
            region = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            array[region] = np.frombuffer(raw, entry.dtype).reshape(box.size)
        found[key] = array
    return found


GRIDS: list[dict[str, Cuts]] = [
    {},
    {"matrix": (3, 1), "vector": (3,), "cube": (2, 1, 1)},
    {"matrix": (2, 2), "vector": (4,), "cube": (1, 3, 2)},
]


@pytest.mark.parametrize("cuts", GRIDS, ids=range(len(GRIDS)))
def test_parts_make_the_tensors_that_torch_reads(cuts, tmp_path):
    write_parts(tmp_path, ARRAYS, cuts)
    ours = loaded(tmp_path)
    theirs = {
        key: torch.zeros(array.shape, dtype=torch.from_numpy(array).dtype) for key, array in ARRAYS.items()
    }
    reader = HuggingFaceStorageReader(str(tmp_path))
    torch.distributed.checkpoint.load(theirs, storage_reader=reader, no_dist=True)
    assert ours.keys() == ARRAYS.keys()
    for key, array in ARRAYS.items():
        assert (ours[key].dtype, ours[key].shape) == (array.dtype, array.shape)
        assert ours[key].tobytes() == array.tobytes() == theirs[key].numpy().tobytes(), key


def edit_header(file: Path, change: Any) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    if change(header["__metadata__"], places) is None:
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def forget_all(notes: Any, places: Any) -> Any:
    del notes["DCP_SHARDING_INFO"]
    return True


def no_json(notes: Any, places: Any) -> Any:
    notes["DCP_SHARDING_INFO"] = "{"
    return True


def forget(notes: Any, places: Any) -> None:
    del places["matrix"]


def too_few(notes: Any, places: Any) -> None:
    places["matrix"]["saved_offsets"] = [0]


def below(notes: Any, places: Any) -> None:
    places["matrix"]["saved_offsets"] = [-1, 0]


def aside(notes: Any, places: Any) -> None:
    places["matrix"]["saved_offsets"] = [9, 0]


def twice(notes: Any, places: Any) -> None:
    places["matrix"]["saved_offsets"] = [0, 0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (forget_all, "no DCP_SHARDING_INFO in its header, which says where the parts belong"),
        (no_json, "DCP_SHARDING_INFO in its header does not say where the parts belong"),
        (forget, "DCP_SHARDING_INFO has no saved_offsets of 2 numbers for matrix"),
        (too_few, "DCP_SHARDING_INFO has no saved_offsets of 2 numbers for matrix"),
        (below, "matrix cannot stand at [-1, 0]"),
        (aside, "matrix: its parts leave holes: 35 elements for [12, 5]; is each rank's file there?"),
    ],
)
def test_places_that_cannot_be_are_told(change, text, tmp_path):
    write_parts(tmp_path, ARRAYS, {"matrix": (3, 1)})
    edit_header(tmp_path / name_of(2, 1), change)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_safetensors_catalog(tmp_path)
    assert text in str(caught.value)


def test_parts_that_overlap_are_told(tmp_path):
    """By their volume, and where a hole makes up for it when they are read."""
    write_parts(tmp_path, ARRAYS, {"matrix": (2, 1)})
    edit_header(tmp_path / name_of(2, 1), twice)
    with pytest.raises(CorruptCheckpointError, match=r"matrix: its parts overlap: 35 elements for \[4, 5\]"):
        read_safetensors_catalog(tmp_path)
    _, parts = spread("llama", tmp_path, lambda key, array: (3, 1) if key == HEAD else (1,) * array.ndim)
    assert verify_checkpoint(parts).is_valid
    (file,) = parts.glob("shard-00002-*")
    edit_header(file, lambda _, places: places[HEAD].update(saved_offsets=[0, 0]))
    (found,) = [one for one in verify_checkpoint(parts).findings if one.severity == "error"]
    assert (found.check, found.where) == ("tiling", HEAD)
    with pytest.raises(CorruptCheckpointError, match=HEAD):
        import_hf(parts, tmp_path / "run")


def test_files_that_are_not_there_are_told(tmp_path):
    """A part in the middle leaves a hole; that of a whole file is known by the names of the others."""
    write_parts(tmp_path, ARRAYS, {"matrix": (3, 1)})
    (tmp_path / name_of(2, 1)).unlink()
    with pytest.raises(CorruptCheckpointError, match="matrix: its parts leave holes: 20 elements for"):
        read_safetensors_catalog(tmp_path)
    (tmp_path / name_of(1, 2)).unlink()
    with pytest.raises(CorruptCheckpointError, match="no rank's part of file 2 of 2"):
        read_safetensors_catalog(tmp_path)
    write_parts(tmp_path, ARRAYS, {"matrix": (3, 1)}, files=3)
    with pytest.raises(CorruptCheckpointError, match="parts of models of 2 and of 3 files"):
        read_safetensors_catalog(tmp_path)


def test_parts_of_other_types_are_told(tmp_path):
    write_parts(tmp_path, ARRAYS, {"matrix": (3, 1)})
    (tmp_path / "other").mkdir()
    wide = {**ARRAYS, "matrix": ARRAYS["matrix"].astype(np.float64)}
    write_parts(tmp_path / "other", wide, {"matrix": (3, 1)})
    shutil.copy(tmp_path / "other" / name_of(3, 1), tmp_path / name_of(3, 1))
    with pytest.raises(
        CorruptCheckpointError, match=r"its parts are float32 of 2 dim.* and float64 of 2 dim"
    ):
        read_safetensors_catalog(tmp_path)


def test_pointers_among_parts_are_named(tmp_path):
    write_parts(tmp_path, ARRAYS, {"matrix": (3, 1)})
    (tmp_path / name_of(3, 1)).write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(UnsupportedCheckpointError, match=f"Git LFS pointers.*\n  - {name_of(3, 1)}$"):
        read_safetensors_catalog(tmp_path)


def spread(name: str, folder: Path, cuts: Any) -> tuple[Path, Path]:
    """A family's model whole, and in parts of ranks; `cuts` says how a tensor of so many axes is cut."""
    tensors = model(name, folder / "whole")
    parts = folder / "parts"
    write_parts(parts, tensors, {key: cuts(key, array) for key, array in tensors.items()})
    (parts / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder / "whole", parts


def by_rows(key: str, array: Any) -> Cuts:
    return (min(2, array.shape[0]), *(1 for _ in array.shape[1:]))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_an_import_of_parts_is_that_of_the_model(name, tmp_path):
    """Every layout, byte for byte: stacked experts and interleaved columns are cut between experts."""
    whole, parts = spread(name, tmp_path, by_rows)
    (parts / "consolidated.safetensors").write_bytes(b"anything")
    report = import_hf(parts, tmp_path / "run")
    assert "not in the index and not read: consolidated.safetensors" in report.notes
    assert diff_checkpoints(whole, tmp_path / "run").is_equal
    assert diff_checkpoints(parts, tmp_path / "run").is_equal
    assert diff_checkpoints(parts, whole).is_equal
    assert diff_checkpoints(parts, tmp_path / "run", DiffOptions(headers=True)).is_equal


def test_parts_cut_across_interleaved_columns_are_refused(tmp_path):
    def across(key: str, array: Any) -> Cuts:
        is_interleaved = key.endswith("experts.gate_up_proj")
        return (1, 1, 4) if is_interleaved else (1,) * array.ndim

    _, parts = spread("gpt_oss", tmp_path, across)
    with pytest.raises(
        UnsupportedCheckpointError, match=r"gate_up_proj.*cut across rows or col.*consolidate_saf"
    ):
        import_hf(parts, tmp_path / "run")


def test_a_lost_last_rank_contradicts_config_json(tmp_path):
    """Which alone tells how long the tensors were."""
    _, parts = spread("llama", tmp_path, by_rows)
    for file in parts.glob("shard-00002-*"):
        file.unlink()
    with pytest.raises(MappingError, match=r"has shape \[\d+, \d+\], config.json asks for"):
        import_hf(parts, tmp_path / "run")
    said, *shapes = verify_checkpoint(parts).findings
    assert shapes and {one.severity for one in shapes} == {"error"}
    assert said.severity == "warning" and said.message.startswith(
        "parts of 1 ranks, 1 to 1: no file says how many ranks"
    )


def test_ranks_that_are_absent_are_counted():
    names = [name_of(1, 1), name_of(4, 1), "config.json"]
    assert what_is_not_told(names).startswith("parts of 2 ranks, 1 to 4, without 2 between them: ")
    assert what_is_not_told(["model.safetensors"]) == ""


def test_a_name_of_any_number_of_files_costs_nothing():
    (said,) = lacking_files(["shard-00001-model-00001-of-99999999999999.safetensors"])
    assert said == "parts of a model of 99,999,999,999,999 files, of which 1 are there"


def test_two_places_of_one_name_are_refused(tmp_path):
    places = '{"a": {"saved_offsets": [0]}, "a": {"saved_offsets": [4]}}'
    texts = {"DCP_SHARDING_INFO": places, "format": "pt"}
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / name_of(1, 1, 1), metadata=texts)
    with pytest.raises(CorruptCheckpointError, match="does not say where the parts belong: duplicate name"):
        read_safetensors_catalog(tmp_path)


def test_a_mean_of_parts_is_a_model_of_the_usual_files(tmp_path):
    whole, parts = spread("llama", tmp_path, by_rows)
    average_checkpoints([parts, whole], tmp_path / "a")
    average_checkpoints([whole, parts], tmp_path / "b")
    truth = load_file(whole / "model.safetensors")
    for name in ("a", "b"):
        assert {f.name for f in (tmp_path / name).iterdir()} == {"config.json", "model.safetensors"}
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == truth.keys()
        assert all(found[key].tobytes() == array.tobytes() for key, array in truth.items())


def test_a_folder_of_parts_needs_a_config(tmp_path):
    _, parts = spread("llama", tmp_path, by_rows)
    (parts / "config.json").unlink()
    with pytest.raises(
        UnsupportedCheckpointError, match=r"no config.json of a Hugging Face model.*Put the one of"
    ):
        import_hf(parts, tmp_path / "run")


@pytest.mark.parametrize(
    ("box", "shape", "seen", "found"),
    [
        (Box((4, 0), (4, 6)), (8, 6), (8, 3, 2), Box((4, 0, 0), (4, 3, 2))),
        (Box((0, 2), (8, 4)), (8, 6), (8, 3, 2), Box((0, 1, 0), (8, 2, 2))),
        (Box((0, 1), (8, 2)), (8, 6), (8, 3, 2), None),
        (Box((0, 2), (8, 3)), (8, 6), (8, 3, 2), None),
        (Box((3,), (3,)), (6,), (2, 3), Box((1, 0), (1, 3))),
        (Box((), ()), (), (), Box((), ())),
        (Box((0, 1), (2, 2)), (2, 4), (2, 1, 4), None),
    ],
)
def test_boxes_with_split_axes(box, shape, seen, found):
    assert split_axes(box, shape, seen) == found
    if found is not None:
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        one = array[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        other = array.reshape(seen)[tuple(slice(a, b) for a, b in zip(found.start, found.stop, strict=True))]
        assert one.tobytes() == other.tobytes()
