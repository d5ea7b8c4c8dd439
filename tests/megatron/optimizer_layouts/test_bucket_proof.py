"""Buckets found again by content, by order where content leaves a choice, and remainders by position.

Synthetic checkpoints of every bucket layout, whole and damaged: placed rightly, or refused.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError, VerificationError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import load_object
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.megatron.keys import bucket_key, bucket_object
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_order import (
    LookAlikes,
    Stretch,
    conventions,
    first_out_of_order,
    place_by_position,
    registration_rank,
    settle,
)
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import (
    Reader,
    find_stretches,
    round_bits,
    windows,
)
from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import (
    Piece,
    find_buffers,
    weight_pieces,
)
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import bucket_states, coalesced_buffers
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import OptimizerStates
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog, Chunk, Item, ObjectEntry, TensorEntry
from tests.commands.test_to_fsdp_dtensor import source_of
from tests.conftest import fixture_dir

from .materialise import read_sources
from .synthetic import Checkpoint, MemoryFiles, Param, build, llama

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


NORM = "self_attention.linear_qkv.layer_norm_weight"
LOCAL_LAYER = (NORM, "self_attention.linear_proj.weight", "self_attention.linear_qkv.weight",
               "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight",
               "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")  # fmt: skip
TE_LAYER = (LOCAL_LAYER[1], LOCAL_LAYER[0], *LOCAL_LAYER[2:])


def piece(name: str, expert: int | None = None, shard: tuple[int, int] = (0, 1)) -> Piece:
    chunk = Chunk(full_box((4,)), Item("f", 0, 16))
    return Piece(name, expert, name, (), "bfloat16", chunk, 0, full_box((4,)), (4,), shard)


def model(layers: list[int], leaves: tuple[str, ...]) -> list[Piece]:
    """Pieces of a model chunk in order of registration."""
    names = ["embedding.word_embeddings.weight"] if 0 in layers else []
    names += [f"decoder.layers.{i}.{leaf}" for i in layers for leaf in leaves]
    return [piece(n) for n in [*names, "decoder.final_layernorm.weight", "output_layer.weight"]]


@given(
    layers=st.integers(1, 5),
    local=st.booleans(),
    alike=st.sets(st.sampled_from([*LOCAL_LAYER, "final_layernorm.weight"])),
    extra=st.booleans(),
)
def test_settled_means_settled_right(layers, local, alike, extra):
    """Some leaves look alike in all layers, also in layers that another buffer holds; the truth is never missed."""
    pieces = model(list(range(2, 2 + layers)), LOCAL_LAYER if local else TE_LAYER)[::-1]
    elsewhere = [piece(f"decoder.layers.{i}.{leaf}") for i in (0, 1) for leaf in LOCAL_LAYER] if extra else []
    equal = tuple(p for p in (*pieces, *elsewhere) if any(p.name.endswith(leaf) for leaf in alike))
    shared = LookAlikes(equal)
    slots = [shared if p in equal and len(equal) > 1 else LookAlikes((p,)) for p in pieces]
    own_layers = {p.name.split(".")[2] for p in pieces if ".layers." in p.name}
    allowed = [p for p in equal if ".layers." not in p.name or p.name.split(".")[2] in own_layers]
    results = {c: settle(slots, allowed, c) for c in conventions(shared_embedding=False)}
    for convention, result in results.items():
        if result is not None and convention.local_norms == local:
            assert result == pieces
    certain = {"self_attention.linear_proj.weight", "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight",
               "mlp.linear_fc2.weight"}  # fmt: skip
    if (
        not alike & certain
    ):  # the matrices stand around the vectors: every convention but the right one drops out
        settled = {tuple(r) for r in results.values() if r is not None}
        assert settled == {tuple(pieces)}


def test_experts_are_told_apart_matrix_by_matrix_or_one_by_one():
    def expert(leaf: str, number: int) -> Piece:
        return piece(f"decoder.layers.0.mlp.experts.experts.{leaf}.weight", number)

    grouped = [expert(leaf, e) for leaf in ("linear_fc2", "linear_fc1") for e in (2, 1, 0)]
    sequential = [expert(leaf, e) for e in (2, 1, 0) for leaf in ("linear_fc2", "linear_fc1")]
    for order, flag in ((grouped, False), (sequential, True)):
        fitting = {
            c.sequential_experts
            for c in conventions(shared_embedding=False)
            if settle([LookAlikes((p,)) for p in order], [], c) is not None
        }
        assert fitting == {flag}


def test_more_look_alikes_than_places_are_not_settled():
    """One of two equal norms is frozen: which one has the state is not known."""
    pieces = model([0, 1], TE_LAYER)[::-1]
    query, key = (next(p for p in pieces if f"{x}_layernorm" in p.name) for x in "qk")
    alike = LookAlikes((query, key))
    slots = [alike if p is query else LookAlikes((p,)) for p in pieces if p is not key]
    assert all(settle(slots, alike.members, c) is None for c in conventions(shared_embedding=False))
    assert any(settle(slots, [query], c) for c in conventions(shared_embedding=False))


def test_unknown_modules_have_no_order_below_them():
    convention = conventions(shared_embedding=False)[0]
    a, b = piece("decoder.layers.1.mixer.A_log"), piece("decoder.layers.1.mixer.D")
    lower = piece("decoder.layers.0.mixer.D")
    ranks = [registration_rank(p, convention) for p in (a, b, lower)]
    assert first_out_of_order(ranks) is None
    assert first_out_of_order([ranks[1], ranks[0], ranks[2]]) is None
    assert first_out_of_order([ranks[2], ranks[0]]) == 1


def as_remainders(made: Checkpoint, params: list[Param], tp: int = 1, pp: int = 1, dp: int = 1) -> Checkpoint:
    """The same checkpoint with int16 buckets, its chunks in files named as the ranks of a job name theirs.

    With FP8 weights no bucket is changed.
    """
    is_plain = any(p.fp8 for p in params)
    files, tensors = made.files, {}
    stages = {(p.key, p.lead): p.stage for p in params}
    for key, entry in made.catalog.tensors.items():
        named = bucket_key(key)
        if named is None:
            chunks = [_renamed(made, c, _writer(entry, c, stages, tp, dp), 0) for c in entry.chunks]
            tensors[key] = replace(entry, chunks=tuple(chunks))
            continue
        group, padded = named.group, -(-entry.numel // math.lcm(dp, 128)) * math.lcm(dp, 128)
        chunks = []
        for chunk in entry.chunks:
            rank = (group // tp * dp + chunk.box.start[0] * dp // padded) * tp + group % tp
            if named.kind != "param" or is_plain:
                chunks.append(_renamed(made, chunk, rank, 1))
                continue
            item = chunk.item
            masters = np.frombuffer(files.read(item.file, item.offset, item.length), np.uint32)
            low = (masters & 0xFFFF).astype(np.uint16).view(np.int16)
            chunks.append(Chunk(chunk.box, files.add(f"__{rank}_2.distcp", low)))
        dtype = "int16" if named.kind == "param" and not is_plain else entry.dtype
        tensors[key] = TensorEntry(key, dtype, entry.shape, tuple(chunks))
    return replace(made, catalog=Catalog("memory", tensors, {}))


def _writer(
    entry: TensorEntry, chunk: Chunk, stages: dict[tuple[str, tuple[int, ...]], int], tp: int, dp: int
) -> int:
    """The first data-parallel rank that has a shard; of what tensor-parallel ranks share, the first of those."""
    axes = next(len(lead) for key, lead in stages if key == entry.key)
    lead, box = chunk.box.start[:axes], zip(*chunk.box, entry.shape, strict=True)
    shard = next((a // n % tp for a, n, whole in list(box)[axes:] if n < whole), 0)
    return stages[entry.key, lead] * dp * tp + shard


def _renamed(made: Checkpoint, chunk: Chunk, rank: int, number: int) -> Chunk:
    name = f"__{rank}_{number}.distcp"
    made.files.data[name] = made.files.data[chunk.item.file]
    return Chunk(chunk.box, chunk.item._replace(file=name))


def found(made: Checkpoint) -> list[Stretch]:
    buffers = find_buffers(made.catalog, made.numels)
    return find_stretches(buffers, tuple(weight_pieces(made.catalog)), Reader(made.files))


def assert_placed(made: Checkpoint) -> None:
    places: dict[tuple[int, str, tuple[int, ...]], list[tuple[str, int, int]]] = {}
    for bucket, start, piece in found(made):
        named = bucket_key(f"{bucket.name}.param")
        assert named
        where = (named.group, piece.key, piece.lead)
        places.setdefault(where, []).append((bucket.name, start, piece.numel))
        assert places[where][0][2] == piece.numel  # gate and up
    whole = {w: (parts[0][0], parts[0][1], sum(n for _, _, n in parts)) for w, parts in places.items()}
    assert whole == made.stretches


@given(
    layers=st.integers(1, 4),
    width=st.sampled_from([8, 24, 40, 64]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 2),
    dp=st.integers(1, 5),
    bucket_size=st.one_of(st.none(), st.integers(1, 3000)),
    local=st.booleans(),
)
def test_every_remainder_is_placed(*, layers, width, tp, pp, dp, bucket_size, local):
    pp = min(pp, layers)
    params = llama(layers, width, 2 * width, 64, pp=pp, local=local)
    made = build(params, tp=tp, pp=pp, dp=dp, bucket_size=bucket_size)
    assert_placed(as_remainders(made, params, tp, pp, dp))


def in_fp8(params: list[Param], width: int) -> list[Param]:
    return [replace(p, fp8=width) if "linear_" in p.key and len(p.shape) == 2 else p for p in params]


@pytest.mark.parametrize("width", [16, 32, -1])
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "bucket_size"), [(1, 1, 1, None), (2, 1, 3, 9000), (1, 2, 2, None), (2, 2, 1, 500)]
)
def test_masters_of_fp8_weights_are_placed_and_proven(width, tp, pp, dp, bucket_size):
    params = in_fp8(llama(3, 64, 128, 64, pp=pp, local=False), width)
    made = build(params, tp=tp, pp=pp, dp=dp, bucket_size=bucket_size)
    assert_placed(as_remainders(made, params, tp, pp, dp))


@pytest.mark.parametrize("width", [32, -1])
def test_fp8_content_decides_where_position_leaves_a_choice(width):
    module = "decoder.layers.0.mlp.experts.experts"
    params = [
        Param(f"{module}.linear_fc{fc}.weight", (e,), (64, 64), fp8=width) for fc in (1, 2) for e in (0, 1)
    ]
    assert_placed(as_remainders(build(params), params))


@pytest.mark.parametrize("width", [32, -1])
@pytest.mark.parametrize("key", ["self_attention.linear_proj", "mlp.linear_fc2"])
def test_swapped_masters_of_fp8_weights_are_refused(width, key):
    params = in_fp8(llama(2, 64, 128, 64, local=False), width)
    made = as_remainders(build(params, dp=2), params, dp=2)
    ends = [next(p for p in params if p.key.endswith(f"{key}.weight") and p.lead == (i,)) for i in (0, 1)]
    spans = [made.stretches[0, p.key, p.lead] for p in ends]
    name = f"{spans[0][0]}.param"
    chunks = made.catalog.tensors[name].chunks
    data = [made.files.read(c.item.file, c.item.offset, c.item.length) for c in chunks]
    flat = np.frombuffer(b"".join(data), np.uint32).copy()
    (_, a, n), (_, b, _) = spans
    flat[a : a + n], flat[b : b + n] = flat[b : b + n].copy(), flat[a : a + n].copy()
    swapped = [
        Chunk(c.box, made.files.add(c.item.file, flat[c.box.start[0] : c.box.stop[0]])) for c in chunks
    ]
    tensors = {
        **made.catalog.tensors,
        name: TensorEntry(name, "float32", (flat.size,), tuple(swapped)),
    }
    refused(
        replace(made, catalog=Catalog("memory", tensors, {})), rf"layers\.0\.{key}.*: no FP8 scale explains"
    )


REAL = ("core019_llama_tp2_dp_reshardable", "core019_llama_dp2_dp_reshardable", "te_llama_dp2_buckets_dpr",
        "core016_llama_tp2_dp_reshardable", "te_moe_ep2_dpr", "v016_dense_dpr_tp2_dp2",
        "main_dense_dpr_pp2_vpp2_tied")  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_position_says_what_content_says_of_real_buckets(name):
    folder = source_of(fixture_dir(name))
    files = open_files(str(folder))
    catalog = read_catalog(files)
    named = ((bucket_object(key), entry.item) for key, entry in catalog.objects.items())
    numels = {
        (about.chain, about.group): load_object(files, item)
        for about, item in named
        if about and about.what == "per_bucket_numel_unpadded"
    }
    buffers, pieces = find_buffers(catalog, numels), tuple(weight_pieces(catalog))
    problems: list[str] = []
    placed = place_by_position(buffers, buffers, pieces, problems)
    assert problems == []
    by_content = find_stretches(buffers, pieces, Reader(files))
    assert {(s.bucket.name, s.start, s.piece) for s in placed} == {
        (s.bucket.name, s.start, s.piece) for s in by_content
    }
    assert len(placed) == len(by_content) > 0


PARAMS = llama(2, 24, 40, 64)


def refused(made: Checkpoint, match: str) -> None:
    with pytest.raises(VerificationError, match=match) as error:
        found(made)
    assert "--weights-only" in str(error.value)


def test_files_that_name_no_rank_are_no_evidence():
    made = as_remainders(build(PARAMS, tp=2), PARAMS, 2)
    tensors = {
        key: replace(
            e, chunks=tuple(Chunk(c.box, c.item._replace(file=f"merged{c.item.file[2:]}")) for c in e.chunks)
        )
        for key, e in made.catalog.tensors.items()
    }
    refused(replace(made, catalog=Catalog("memory", tensors, {})), "do not say which rank wrote them")


def test_a_parameter_that_no_bucket_has_room_for():
    made = as_remainders(build(PARAMS[:-1]), PARAMS)
    more = as_remainders(build(PARAMS), PARAMS)
    tensors = {**made.catalog.tensors, "output_layer.weight": more.catalog.tensors["output_layer.weight"]}
    made.files.data.setdefault("__0_0.distcp", bytearray()).extend(bytes(1 << 16))
    refused(replace(made, catalog=Catalog("memory", tensors, {})), "no order of its rank's 15 parameters")


SWAPPED = [*PARAMS[:2], PARAMS[3], PARAMS[2], *PARAMS[4:]]


def experts(fc2_rows: int) -> list[Param]:
    shapes = ((1, (16, 16)), (2, (fc2_rows, 16)))
    module = "decoder.layers.0.mlp.experts.experts"
    return [Param(f"{module}.linear_fc{fc}.weight", (e,), shape) for fc, shape in shapes for e in (0, 1)]


@pytest.mark.parametrize(
    ("params", "message"), [(SWAPPED, "no order"), (experts(16), "several orders"), (experts(32), None)]
)
def test_an_order_that_is_none_or_leaves_a_choice(params, message):
    made = as_remainders(build(params), params)
    if message is None:
        assert_placed(made)
    else:
        refused(made, message)


def test_states_that_ranks_share_must_be_equal():
    made = as_remainders(build(PARAMS, tp=2), PARAMS, 2)
    name, start, _ = made.stretches[1, "decoder.final_layernorm.weight", ()]
    item = next(i for first, i in made.bucket_bits(name, "param") if first == start)
    made.files.data[item.file][item.offset] ^= 1
    refused(made, "final_layernorm.weight .*its master differs between")


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
