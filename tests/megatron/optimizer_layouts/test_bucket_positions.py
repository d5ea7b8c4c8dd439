"""Buckets of remainders: placed where content places plain masters, refused where position leaves a choice."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import VerificationError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import load_object
from ckpt_tools.megatron.keys import bucket_key, bucket_object
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_order import Stretch, place_by_position
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import Reader, find_stretches
from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import (
    find_buffers,
    weight_pieces,
)
from ckpt_tools.model.catalog import Catalog, Chunk, TensorEntry
from tests.commands.test_to_fsdp_dtensor import source_of
from tests.conftest import fixture_dir

from .synthetic import Checkpoint, Param, build, llama


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
