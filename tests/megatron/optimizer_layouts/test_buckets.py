"""What metadata says about buckets, and what is refused before any content is read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import round_bits, windows
from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import find_buffers, weight_pieces
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import coalesced_buffers
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Catalog, Chunk, Item, ObjectEntry, TensorEntry

from .synthetic import Checkpoint, MemoryFiles, build, llama

NAME = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"


def change(made: Checkpoint, key: str, **fields: Any) -> None:
    tensors: dict[str, TensorEntry] = made.catalog.tensors  # type: ignore[assignment]
    old = tensors[key]
    values = {"key": key, "dtype": old.dtype, "shape": old.shape, "chunks": old.chunks} | fields
    tensors[key] = TensorEntry(**values)


Damage = Callable[[Checkpoint], object]


@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (lambda m: change(m, f"{NAME}.exp_avg", dtype="int16"), UnsupportedCheckpointError, "exp_avg is int16"),
        (lambda m: m.catalog.tensors.pop(f"{NAME}.param"), UnsupportedCheckpointError, "no master weights"),
        (lambda m: change(m, f"{NAME}.exp_avg", chunks=m.catalog.tensors[f"{NAME}.exp_avg"].chunks[:-1]),
         CorruptCheckpointError, r"exp_avg: chunks hold \d+ of \d+ elements"),
        (lambda m: [m.catalog.tensors.pop(f"{NAME}.{k}") for k in ("param", "exp_avg", "exp_avg_sq")],
         CorruptCheckpointError, r"buckets \[1, .*of this buffer are there, but \d were saved"),
        (lambda m: m.numels.__setitem__((0, 7), [[{("a", "b"): [8]}]]),
         CorruptCheckpointError, "dp_group_idx_7: none of its buckets is there"),
        (lambda m: m.numels[0, 0][0][0].__setitem__(("bfloat16", "float32"), [10**6] * 4),
         CorruptCheckpointError, "1000000 elements were saved"),
        (lambda m: m.numels.__setitem__((0, 0), [["?"]]), CorruptCheckpointError, "but 0 were saved"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(damage, error, match):
    made = build(llama(2, 24, 40, 64), bucket_size=2500)
    assert len(made.numels[0, 0][0][0]["bfloat16", "float32"]) == 4
    damage(made)
    with pytest.raises(error, match=match):
        find_buffers(made.catalog, made.numels)


def test_a_chunk_of_several_experts_gives_a_piece_each():
    key = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    item = Item("w", 0, 1)
    chunks = tuple(Chunk(Box((i, e, 0, 0), (1, 2, 3, 5)), item) for i in range(2) for e in (0, 2))
    catalog = Catalog("m", {key: TensorEntry(key, "bfloat16", (2, 4, 3, 5), chunks)}, {})
    pieces = list(weight_pieces(catalog))
    assert [(p.lead, p.expert, p.first) for p in pieces] == [
        ((i, e), e, 15 * (e % 2)) for i in range(2) for e in range(4)
    ]
    assert {p.shard for p in pieces} == {(0, 1)}


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    to=st.sampled_from(["bfloat16", "float16"]),
)
def test_rounding_equals_torch_bit_for_bit(bits, to):
    values = np.array(bits, np.uint32)
    expected = (
        torch.from_numpy(values.view(np.float32)).to(getattr(torch, to)).view(torch.int16).numpy().view("u2")
    )
    got = round_bits(values, "float32", to)
    nan = np.isnan(values.view(np.float32))
    assert got[~nan].tobytes() == expected[~nan].tobytes()
    assert np.isnan(torch.from_numpy(got.view("i2")).view(getattr(torch, to)).float().numpy()[nan]).all()


def test_rounding_to_the_type_itself_changes_nothing_and_to_others_is_refused():
    bits = np.array([0x7FC00001], np.uint32)
    assert round_bits(bits, "float32", "float32") is bits
    with pytest.raises(UnsupportedCheckpointError, match="float32 for weights of type float8_e4m3fn"):
        round_bits(bits, "float32", "float8_e4m3fn")


@given(numel=st.integers(1, 1000))
def test_samples_lie_inside_and_reach_both_ends(numel):
    found = windows(numel)
    assert found[0][0] == 0 and sum(found[-1]) == numel
    assert all(0 <= a < a + n <= numel for a, n in found)


@pytest.mark.parametrize(
    "state", [[{0: {}}], [], [{"buckets_coalesced": False}], [{"buckets_coalesced": True, 0: 5}]]
)
def test_param_states_of_unknown_form_are_refused(state):
    files = MemoryFiles()
    archive = np.frombuffer(dump_archive(state), np.uint8)
    item = files.add("f", archive)._replace(bare=False)
    key = "chained_1.optimizer.distributed.dp_group_idx_3.param_state/shard_0_1"
    with pytest.raises(
        UnsupportedCheckpointError, match="chain 1, dp_group_idx_3: param_state does not have the form"
    ):
        coalesced_buffers(files, Catalog("m", {}, {key: ObjectEntry(key, item)}))
