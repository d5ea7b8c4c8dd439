"""Buckets found again by content: synthetic checkpoints of every bucket layout, whole and damaged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import VerificationError
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import Reader, find_stretches
from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import find_buffers, weight_pieces
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import bucket_states
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import OptimizerStates

from .materialise import read_sources
from .synthetic import Checkpoint, Param, build, llama

LAYOUTS = ("dp_reshardable", "bucket_1d", "bucket_2d", "coalesced")


def recover(made: Checkpoint, *, sample_only: bool = False) -> OptimizerStates:
    buffers = tuple(made.coalesced) or find_buffers(made.catalog, made.numels)
    pieces = tuple(weight_pieces(made.catalog))
    found = find_stretches(buffers, pieces, Reader(made.files), sample_only=sample_only)
    return bucket_states(made.catalog, "any", buffers, found)


def assert_recovered(made: Checkpoint, states: OptimizerStates) -> None:
    for (kind, key, lead), expected in made.truth.items():
        got = read_sources(made.files, made.catalog, states, states.sources(kind, key, lead))
        assert got.tobytes() == expected.tobytes() and got.shape == expected.shape


@given(
    layout=st.sampled_from(LAYOUTS),
    layers=st.integers(1, 4),
    width=st.sampled_from([8, 24, 40, 64]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 2),
    dp=st.integers(1, 5),
    bucket_size=st.one_of(st.none(), st.integers(1, 3000)),
    local=st.booleans(),
    ones=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_state_is_found(*, layout, layers, width, tp, pp, dp, bucket_size, local, ones, seed):  # fmt: skip
    pp = min(pp, layers)
    params = llama(layers, width, 2 * width, 64, pp=pp, local=local, ones=ones)
    made = build(params, tp=tp, pp=pp, dp=dp, bucket_size=bucket_size, layout=layout, seed=seed)
    assert_recovered(made, recover(made))


@pytest.mark.parametrize("sample_only", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_parameters_are_sampled_and_compared_in_tiles(layout, sample_only):
    made = build([Param("embedding.word_embeddings.weight", (), (1100, 1024), 0)], tp=2, dp=2, layout=layout)
    assert_recovered(made, recover(made, sample_only=sample_only))


def damaged(layout: str = "dp_reshardable", **changes: int) -> Checkpoint:
    return build(llama(3, 24, 40, 64), tp=2, dp=2, layout=layout, **changes)


def masters(made: Checkpoint, group: int, key: str, lead: tuple[int, ...]) -> tuple[list[int], str, int]:
    """Byte offsets in the file `buckets` of the masters of a parameter, its bucket and first element."""
    name, start, numel = made.stretches[group, key, lead]
    offsets = []
    for first, item in made.bucket_bits(name, "param"):
        inside = range(max(first, start), min(first + item.length // 4, start + numel))
        offsets += [item.offset + 4 * (i - first) for i in inside]
    return offsets, name, start


FC1 = "decoder.layers.mlp.linear_fc1.weight"
QKV = "decoder.layers.self_attention.linear_qkv.weight"


@pytest.mark.parametrize("element", [0, 5, 100, 700, 959])
def test_a_flipped_element_is_refused_by_name(element):
    made = damaged()
    offsets, name, _ = masters(made, 1, FC1, (2,))
    made.files.data["buckets"][offsets[element] + 2] ^= 1  # one unit of the bf16 value
    with pytest.raises(VerificationError) as error:
        recover(made)
    assert "decoder.layers.2.mlp.linear_fc1.weight" in str(error.value)
    assert name in str(error.value)
    assert "--dist-ckpt-optim-fully-reshardable" in str(error.value)


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ((0, QKV, (0,)), (0, QKV, (2,)), r"layers\.\d\.self_attention\.linear_qkv.*order of registration"),
        (
            (0, QKV, (1,)),
            (1, QKV, (1,)),
            r"dp_group_idx_0: holds the shards \[0, 1\] of 2.*linear_qkv.weight \[1\]",
        ),
        ((0, EMBEDDING, ()), (0, OUTPUT, ()), r"embedding.*is before.*against the order"),
    ],
)
def test_exchanged_segments_are_refused_by_name(one, other, message):
    made = damaged()
    data = made.files.data["buckets"]
    for a, b in zip(masters(made, *one)[0], masters(made, *other)[0], strict=True):
        data[a : a + 4], data[b : b + 4] = data[b : b + 4], data[a : a + 4]
    with pytest.raises(VerificationError, match=message):
        recover(made)


@pytest.mark.parametrize("at", [0, 300])
def test_a_garbage_gap_inside_a_parameter_is_refused_by_name(at):
    made = damaged()
    offsets, name, start = masters(made, 0, FC1, (1,))
    values = [bytes(made.files.data["buckets"][o : o + 4]) for o in offsets]
    shifted = values[:at] + [b"\xde\xad\xbe\xef"] * 32 + values[at:-32]
    for offset, value in zip(offsets, shifted, strict=True):
        made.files.data["buckets"][offset : offset + 4] = value
    with pytest.raises(VerificationError) as error:
        recover(made)
    assert name in str(error.value)
    assert f"{start}.." in str(error.value) or "decoder.layers.1.mlp.linear_fc1.weight" in str(error.value)


def test_padding_is_never_read_into_a_state():
    made = damaged()
    used = {offset for key in made.stretches for offset in masters(made, *key)[0]}
    items = [
        i for name in {n for n, _, _ in made.stretches.values()} for _, i in made.bucket_bits(name, "param")
    ]
    padding = [o for i in items for o in range(i.offset, i.offset + i.length, 4) if o not in used]
    assert padding
    for offset in padding:
        made.files.data["buckets"][offset : offset + 4] = b"\x7f\xc0\x00\x01"
    assert_recovered(made, recover(made))


def test_copies_on_two_ranks_must_agree():
    made = damaged()
    key = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    name, start, _ = made.stretches[1, key, (0,)]
    (item,) = (item for first, item in made.bucket_bits(name, "exp_avg_sq") if first == start)
    made.files.data["buckets"][item.offset] ^= 1
    with pytest.raises(
        VerificationError, match=r"layers\.0\.mlp\.linear_fc1\.layer_norm_weight .*exp_avg_sq differs"
    ):
        recover(made)


def test_look_alikes_without_an_order_are_refused_by_name():
    """Two equal vectors of modules that nobody knows: nothing says which is which."""
    params = [
        Param("encoder_a.alpha", (), (64,), ones=True),
        Param("encoder_a.beta", (), (64,), ones=True),
        Param("output_layer.weight", (), (64, 8)),
    ]
    with pytest.raises(VerificationError, match=r"2 weights have equal elements.*encoder_a\.alpha"):
        recover(build(params))


def test_a_part_without_state_is_refused_by_name():
    made = damaged()
    lost = {key for key in made.catalog.tensors if ".dp_group_idx_1." in key}
    for key in lost:
        del made.catalog.tensors[key]  # type: ignore[attr-defined]
    del made.numels[0, 1]
    with pytest.raises(
        VerificationError, match=r"linear_fc1.weight .*has no optimizer state, but other parts"
    ):
        recover(made)


def test_frozen_weights_have_no_state():
    made = build(llama(2, 24, 40, 64))
    weight = np.full((5, 7), 0x1234, np.uint16)
    frozen = build([Param("vision_model.conv1.weight", (), (5, 7))])
    item = made.files.add("weights", weight)
    entry = frozen.catalog.tensors["vision_model.conv1.weight"]
    chunk = entry.chunks[0]._replace(item=item)
    made.catalog.tensors[entry.key] = type(entry)(entry.key, entry.dtype, entry.shape, (chunk,))  # type: ignore[index]
    states = recover(made)
    assert ("master", entry.key) not in states.states
    assert_recovered(made, states)
