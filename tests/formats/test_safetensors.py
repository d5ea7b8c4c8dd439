"""Safetensors directories: read as the safetensors library reads them, refused where it refuses, by name."""

import json
import os
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_model
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError
from ckpt_tools.formats.safetensors import (
    INDEX_FILE,
    SINGLE_FILE,
    read_safetensors_catalog,
    read_safetensors_header,
    unread_files,
)
from ckpt_tools.formats.storage.open_files import open_files
from tests.fuzz.mutate import mutate
from tests.fuzz.parsers import OneFile, seeds

ARRAYS: dict[str, Any] = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "scalar": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 4), np.float16),
    "flags": np.array([True, False]),
}


def header_of(tensors: dict[str, Any], data: bytes, pad: int = 0) -> bytes:
    text = json.dumps(tensors).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def test_every_payload_is_found(tmp_path):
    save_file(ARRAYS, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    catalog = read_safetensors_catalog(tmp_path)
    assert catalog.tensors.keys() == ARRAYS.keys()
    raw = (tmp_path / SINGLE_FILE).read_bytes()
    for key, array in ARRAYS.items():
        entry = catalog.tensors[key]
        (chunk,) = entry.chunks
        assert (entry.shape, entry.nbytes) == (array.shape, array.nbytes) and chunk.item.bare
        assert chunk.box.size == array.shape
        assert raw[chunk.item.offset : chunk.item.offset + chunk.item.length] == array.tobytes()


def sharded(root: Path) -> dict[str, Any]:
    root.mkdir(exist_ok=True)
    weight_map = {}
    for number, key in enumerate(("matrix", "scalar"), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({key: ARRAYS[key]}, root / name)
        weight_map[key] = name
    return {"metadata": {"total_size": 56}, "weight_map": weight_map}


def test_shards_are_read_through_the_index(tmp_path):
    (tmp_path / INDEX_FILE).write_text(json.dumps(sharded(tmp_path)))
    assert read_safetensors_catalog(tmp_path).tensors.keys() == {"matrix", "scalar"}


def break_index(index: dict[str, Any], root: Path) -> None:
    index["weight_map"]["ghost"] = index["weight_map"]["matrix"]


def missing_shard(index: dict[str, Any], root: Path) -> None:
    (root / index["weight_map"]["scalar"]).unlink()


def moved_tensor(index: dict[str, Any], root: Path) -> None:
    index["weight_map"] |= {"scalar": index["weight_map"]["matrix"], "matrix": index["weight_map"]["scalar"]}


def escaping(index: dict[str, Any], root: Path) -> None:
    index["weight_map"]["matrix"] = "../model.safetensors"


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (break_index, "lacks ghost"),
        (missing_shard, "shard model-00002-of-00002.safetensors is missing"),
        (moved_tensor, "holds matrix, which the index places in model-00002-of-00002.safetensors"),
        (escaping, "is not a file name"),
    ],
)
def test_index_and_shards_must_agree(damage, text, tmp_path):
    index = sharded(tmp_path)
    damage(index, tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError) as caught:
        read_safetensors_catalog(tmp_path)
    assert text in str(caught.value)


def test_directories_without_one_set_of_weights_are_refused(tmp_path):
    with pytest.raises(UnsupportedCheckpointError, match="neither"):
        read_safetensors_catalog(tmp_path)
    index = sharded(tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match="the index is missing"):
        read_safetensors_catalog(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    save_file(ARRAYS, tmp_path / SINGLE_FILE)
    with pytest.raises(UnsupportedCheckpointError, match="both"):
        read_safetensors_catalog(tmp_path)


def test_files_beside_the_index_are_not_read(tmp_path):
    """Mistral publishes its weights a second time, as `consolidated.safetensors`; that one may be anything."""
    (tmp_path / INDEX_FILE).write_text(json.dumps(sharded(tmp_path)))
    save_file({"old": ARRAYS["matrix"]}, tmp_path / "consolidated.safetensors")
    (tmp_path / "extra.safetensors").write_bytes(b"damaged")
    assert read_safetensors_catalog(tmp_path).tensors.keys() == {"matrix", "scalar"}
    with closing(open_files(str(tmp_path))) as files:
        assert unread_files(files) == ("consolidated.safetensors", "extra.safetensors")


def test_what_torch_writes_in_parts_is_read(tmp_path):
    """A model of one process; joined by torch it is the same. How parts of several come together: test_rank_parts."""
    parts, joined = tmp_path / "parts", tmp_path / "joined"
    state = {"matrix": torch.from_numpy(ARRAYS["matrix"]), "vector": torch.ones(5)}
    writer = HuggingFaceStorageWriter(str(parts), dict.fromkeys(state, 1), save_distributed=True)
    torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)
    assert [file.name for file in parts.iterdir()] == ["shard-00001-model-00001-of-00001.safetensors"]
    joined.mkdir()
    consolidate_safetensors_files(str(parts), str(joined), dict.fromkeys(state, 1))
    for folder in (parts, joined):
        found = read_safetensors_catalog(folder).tensors
        assert {name: entry.shape for name, entry in found.items()} == {
            n: tuple(a.shape) for n, a in state.items()
        }


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 4976698672\n"


@pytest.mark.parametrize("name", [SINGLE_FILE, "model-00002-of-00002.safetensors", INDEX_FILE])
def test_lfs_pointers_are_named(name, tmp_path):
    if name != SINGLE_FILE:
        (tmp_path / INDEX_FILE).write_text(json.dumps(sharded(tmp_path)))
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(UnsupportedCheckpointError, match=f"Git LFS pointers.*`git lfs pull`.*\n  - {name}$"):
        read_safetensors_catalog(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytorch_model.bin", "but pytorch_model.bin: pickled or other weights are not read"),
        (
            "pytorch_model-00001-of-00002.bin",
            "if you trust .* may run code .*weights_only=True.*save_pretrained",
        ),
        ("consolidated.00.pth", "but consolidated.00.pth: pickled"),
        ("model-Q4_K_M.gguf", "but model-Q4_K_M.gguf"),
        (
            "adapter_model.safetensors",
            "an adapter .LoRA. without its model. `import-hf HF OUT --adapter PEFT` merges",
        ),
    ],
)
def test_folders_with_other_weights_say_what_to_do(name, text, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(UnsupportedCheckpointError, match=text):
        read_safetensors_catalog(tmp_path)


def tensor(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "header of 0 bytes in a file of 0 bytes"),
        ((10**9).to_bytes(8, "little") + b"{}", "header of 1,000,000,000 bytes"),
        ((200).to_bytes(8, "little") + b"{}", "header of 200 bytes in a file of 10 bytes"),
        ((2).to_bytes(8, "little") + b"{!", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((16).to_bytes(8, "little") + b'{"a": 1, "a": 2}', "duplicate name 'a'"),
        (header_of({"a": {"shape": [1]}}, b""), "a: expected dtype, shape and data_offsets"),
        (header_of({"a": tensor(0, 4, [1], "F7")}, bytes(4)), "unknown element type 'F7'"),
        (header_of({"a": tensor(0, 4, [-1])}, bytes(4)), "cannot be"),
        (header_of({"a": tensor(0, 4, [2])}, bytes(4)), "needs 8 bytes, data_offsets give 4"),
        (header_of({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, bytes(12)), "b: begins at byte"),
        (
            header_of({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, bytes(12)),
            "overlaps the tensor before it",
        ),
        (header_of({"a": tensor(0, 4, [1])}, bytes(3)), "truncated"),
        (header_of({"a": tensor(0, 4, [1])}, bytes(5)), "trailing bytes"),
    ],
)
def test_files_that_break_the_format_are_refused(content, text, tmp_path):
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_safetensors_catalog(tmp_path)
    assert text in str(caught.value)
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(tmp_path / SINGLE_FILE, "np"):
        pass


@pytest.mark.parametrize("by_index", [False, True])
def test_a_tensor_is_found_under_all_names_that_a_writer_gave_it(by_index, tmp_path):
    """`save_model` stores one of its names, and the header lists the others; of several files (huggingface_hub) the
    index does."""
    one = np.arange(6, dtype=np.float32)
    texts = {"a.weight": "d.weight", "b.weight": "d.weight", "format": "pt", "c.weight": "no.tensor"}
    if by_index:
        save_file({"d.weight": one}, tmp_path / "1.safetensors", metadata={"format": "pt"})
        index = {"metadata": {**texts, "total_size": 24}, "weight_map": {"d.weight": "1.safetensors"}}
        (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    else:
        module = torch.nn.ModuleDict({name: torch.nn.Linear(2, 3, bias=False) for name in "dab"})
        module["a"].weight = module["b"].weight = module["d"].weight
        save_model(module, str(tmp_path / SINGLE_FILE))
        with torch.no_grad():
            one = module["d"].weight.numpy().copy()
    tensors = read_safetensors_catalog(tmp_path).tensors
    assert {name: entry.key for name, entry in tensors.items()} == {
        f"{n}.weight": f"{n}.weight" for n in "abd"
    }
    ((chunk,),) = {entry.chunks for entry in tensors.values()}
    raw = (tmp_path / chunk.item.file).read_bytes()
    assert raw[chunk.item.offset : chunk.item.offset + chunk.item.length] == one.tobytes()


def test_padding_of_the_header_is_allowed(tmp_path):
    (tmp_path / SINGLE_FILE).write_bytes(header_of({"a": tensor(0, 4, [1])}, bytes(4), pad=5))
    assert read_safetensors_catalog(tmp_path).tensors["a"].shape == (1,)


def library_takes(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


def we_take(content: bytes) -> bool:
    try:
        read_safetensors_header(OneFile(content), "input")
    except CorruptCheckpointError:
        return False
    return True


def with_header(text: str | bytes, data: bytes = bytes(4)) -> bytes:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + data


ONE = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
STRANGE = [
    with_header(" " + ONE),
    with_header("\ufeff" + ONE),
    *(with_header(ONE.encode(code)) for code in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig")),
    with_header(ONE.replace('"a"', '"\\\\ud800"')),
    with_header(ONE.replace('"a"', '"\ud800"')),
    with_header(ONE.replace("[1]", "[1.0]")),
    with_header(ONE.replace("[1]", "[1e0]")),
    with_header(ONE.replace("[0,4]", "[-0,4]")),
    with_header(ONE.replace("[0,4]", "[0,4,4]")),
    with_header(ONE.replace("[0,4]", "[0]")),
    with_header(ONE.replace("[1]", "[true]")),
    with_header(ONE.replace('"F32"', '"F32","dtype":"F32"')),
    with_header(ONE.replace('"F32"', '"F32","more":1')),
    with_header(ONE.replace('"F32"', '"F32","more":NaN')),
    with_header(ONE.replace('"F32"', '"f32"')),
    *(
        with_header(ONE.replace("{", f'{{"__metadata__":{notes},', 1))
        for notes in (
            "null",
            "{}",
            '{"a":"b"}',
            '{"a":1}',
            "[]",
            "1",
            '"x"',
            '{"a":null}',
            '{"a":"\\\\ud800"}',
            "NaN",
        )
    ),
    with_header(
        ONE.replace("[1]", "[0,2305843009213693952,2305843009213693952]").replace("[0,4]", "[0,0]"), b""
    ),
    with_header(
        ONE.replace("[1]", "[2305843009213693952,2305843009213693952,0]").replace("[0,4]", "[0,0]"), b""
    ),
    with_header(ONE.replace("[1]", "[9223372036854775808,0]").replace("[0,4]", "[0,0]"), b""),
    with_header("{}", b""),
    with_header("{}", b"x"),
    with_header(ONE + "\0"),
    with_header(ONE + " " * 5),
    with_header(ONE + "\n\t"),
    with_header(ONE + "\x0b"),
    with_header(ONE + ONE),
    with_header(ONE)[:-1],
    with_header(ONE) + b"x",
    (2**63).to_bytes(8, "little") + ONE.encode() + bytes(4),
    (2**64 - 1).to_bytes(8, "little") + ONE.encode() + bytes(4),
    bytes(8),
    b"",
]


@pytest.mark.parametrize("content", STRANGE, ids=range(len(STRANGE)))
def test_no_strange_header_is_taken_that_the_library_refuses(content):
    assert library_takes(content) or not we_take(content)


def test_some_are_taken():
    assert we_take(with_header(ONE)) and library_takes(with_header(ONE))
    assert sum(map(we_take, STRANGE)) >= 5


def test_no_damaged_header_is_taken_that_the_library_refuses():
    """`CKPT_TOOLS_SEEDS=1000000` tries so many."""
    rng = random.Random(11)
    starts = [with_header(ONE), *STRANGE, *(data for data in seeds("safetensors") if len(data) < 1000)]
    good = [content for content in starts if library_takes(content)]
    ours = theirs = 0
    for _ in range(int(os.environ.get("CKPT_TOOLS_SEEDS", "4000"))):
        content = mutate(rng, "safetensors", rng.choice(good if rng.random() < 0.8 else starts), starts)
        if rng.random() < 0.7 and len(content) >= 8:  # else most fail for their length alone
            body = content[8:].split(b"}}")
            header = b"}}".join(body[:-1]) + b"}}" if len(body) > 1 else content[8:]
            content = with_header(header, content[8 + len(header) :])
        we, they = we_take(content), library_takes(content)
        assert they or not we, content
        ours, theirs = ours + we, theirs + they
    assert ours > 20
    assert theirs - ours < theirs / 2  # and few are refused that the library takes


@pytest.mark.parametrize("text", ["[1]", "null", "{}", "3"])
def test_an_index_without_a_weight_map(text, tmp_path):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"not a safetensors index: it has no weight_map$"):
        read_safetensors_catalog(str(tmp_path))
