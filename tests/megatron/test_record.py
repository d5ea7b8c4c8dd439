"""What a conversion recorded beside its tensors, and for which job a checkpoint is."""

import json
from pathlib import Path

import pytest

from ckpt_tools.errors import CorruptCheckpointError, MappingError
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.megatron.run_state.record import (
    RECORD_FILE,
    Size,
    TargetRecord,
    read_record,
    record_bytes,
    stored_tp,
)

RECORD = TargetRecord("core-0.16", tp=Size(2, "--tp"), ep=Size(4, "args"), tokens=201)


def read(folder: Path, content: bytes | None) -> TargetRecord | None:
    if content is not None:
        (folder / RECORD_FILE).write_bytes(content)
    return read_record(LocalFiles(str(folder)))


def test_what_is_written_is_read(tmp_path):
    assert read(tmp_path, None) is None
    assert read(tmp_path, record_bytes(RECORD)) == RECORD
    assert read(tmp_path, record_bytes(TargetRecord("main"))) == TargetRecord("main")
    assert json.loads(record_bytes(RECORD)) == {
        "schema_version": 1,
        "target": "core-0.16",
        "topology": {
            "tp": {"ranks": 2, "source": "--tp"},
            "ep": {"ranks": 4, "source": "args"},
            "etp": None,
            "dp": None,
            "cp": None,
        },
        "tokens": 201,
    }


def test_a_record_of_before_context_parallel_sizes_is_read(tmp_path):
    old = json.loads(record_bytes(RECORD))
    del old["topology"]["cp"]
    assert read(tmp_path, json.dumps(old).encode()) == RECORD


GOOD = json.loads(record_bytes(RECORD))


def with_tp(tp: object) -> dict[str, object]:
    return {"topology": GOOD["topology"] | {"tp": tp}}


CHANGED: list[dict[str, object]] = [
    {"schema_version": 2}, {"target": 3}, {"target": "mxin"}, {"tokens": True}, {"tokens": 0}, {"fprmat": "dcp"},
    {"topology": GOOD["topology"] | {"up": None}}, {"topology": []}, with_tp(2),
    with_tp({"ranks": 2.0, "source": ""}),
    with_tp({"ranks": -2, "source": ""}), with_tp({"ranks": 2, "source": None}),
]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"[]", b"null", b"[" * 100_000, b"{}", b" " * (2 << 20)),
        *(json.dumps(GOOD | changed).encode() for changed in CHANGED),
    ],
)
def test_what_is_no_record_is_refused_by_name(tmp_path, content):
    with pytest.raises(CorruptCheckpointError, match=RECORD_FILE):
        read(tmp_path, content)


NATIVE, CARRIED = (
    {"tensor_model_parallel_size": 8, "ckpt_format": kind} for kind in ("fsdp_dtensor", "torch_dist")
)
STATES = [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    ("record", "rng", "args", "expected"),
    [
        (RECORD, STATES, NATIVE, Size(2, RECORD_FILE)),
        (RECORD, [], NATIVE, Size(2, RECORD_FILE)),
        (None, STATES, NATIVE, Size(2, "rng states")),
        (TargetRecord("main"), STATES, NATIVE, Size(2, "rng states")),
        (None, [], NATIVE, Size(8, "args")),
        (None, [], CARRIED, None),
        (None, [], {}, None),
        (None, [], {"ckpt_format": "fsdp_dtensor"}, None),
    ],
)
def test_for_how_many_ranks_a_checkpoint_is(record, rng, args, expected):
    assert stored_tp(record, rng, args) == expected


def test_a_record_of_another_checkpoint_is_refused():
    with pytest.raises(MappingError, match="2 tensor-parallel ranks, and it holds rng states of 1"):
        stored_tp(RECORD, [(0, 0)], {})
