"""Small synthetic checkpoints with bucket layouts, built from the formulas of Megatron's buffers, in memory.

Synthetic: no Megatron code wrote them. They stand for what has no real file (`fully_sharded_bucket_space`, several
joined buckets, look-alikes) and let a property test choose topology, cuts and contents.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import Bucket, Buffer, flatten
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog, Chunk, Item, TensorEntry

Bits = npt.NDArray[np.uint32]
KINDS = ("param", "exp_avg", "exp_avg_sq")


class MemoryFiles:
    """`Files` over byte strings."""

    location = "memory"

    def __init__(self) -> None:
        self.data: dict[str, bytearray] = {}

    def exists(self, name: str) -> bool:
        return name in self.data

    def size(self, name: str) -> int:
        return len(self.data[name])

    def list(self) -> list[str]:
        return sorted(self.data)

    def read(self, name: str, offset: int, length: int) -> bytes:
        return bytes(self.data[name][offset : offset + length])

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[name][offset : offset + len(buffer)]

    def close(self) -> None:
        pass

    def add(self, name: str, values: npt.NDArray[np.generic]) -> Item:
        """A bare item with these elements at the end of a file."""
        file = self.data.setdefault(name, bytearray())
        item = Item(name, len(file), values.nbytes, bare=True)
        file += values.tobytes()
        return item


@dataclass(frozen=True)
class Param:
    """A live parameter: its stored key and lead, its full shape, how tensor parallelism cuts it, where it lives."""

    key: str
    lead: tuple[int, ...]
    shape: tuple[int, ...]
    tp_axis: int | None = None
    gated: bool = False
    stage: int = 0
    ones: bool = False
    fp8: int = 0  # elements of a row with one scale, -1: the whole shard has one; 0: not in FP8


@dataclass
class Checkpoint:
    files: MemoryFiles
    catalog: Catalog
    numels: dict[tuple[int, int], list[list[dict[tuple[str, str], list[int]]]]]
    truth: dict[tuple[str, str, tuple[int, ...]], Bits]
    stretches: dict[tuple[int, str, tuple[int, ...]], tuple[str, int, int]] = field(default_factory=dict)
    coalesced: list[Buffer] = field(default_factory=list)

    def bucket_bits(self, name: str, kind: str) -> Iterator[tuple[int, Item]]:
        """(first element, item) of every chunk of a bucket's state."""
        return iter((first, c.item) for first, c in flatten(self.catalog.tensors[f"{name}.{kind}"]).chunks)


def llama(
    layers: int, hidden: int, ffn: int, vocab: int, *, pp: int = 1, local: bool = True, ones: bool = False
) -> list[Param]:
    """Parameters of a small gated model in order of registration; `local` says where the first norm stands."""
    p = "decoder.layers."
    out = [Param("embedding.word_embeddings.weight", (), (vocab, hidden), 0)]
    for i in range(layers):
        stage = i * pp // layers
        norm = Param(
            p + "self_attention.linear_qkv.layer_norm_weight", (i,), (hidden,), stage=stage, ones=ones
        )
        proj = Param(p + "self_attention.linear_proj.weight", (i,), (hidden, hidden), 1, stage=stage)
        out += [norm, proj] if local else [proj, norm]
        out += [
            Param(p + "self_attention.linear_qkv.weight", (i,), (2 * hidden, hidden), 0, stage=stage),
            Param(p + "mlp.linear_fc1.layer_norm_weight", (i,), (hidden,), stage=stage, ones=ones),
            Param(p + "mlp.linear_fc1.weight", (i,), (2 * ffn, hidden), 0, gated=True, stage=stage),
            Param(p + "mlp.linear_fc2.weight", (i,), (hidden, ffn), 1, stage=stage),
        ]
    out.append(Param("decoder.final_layernorm.weight", (), (hidden,), stage=pp - 1, ones=ones))
    out.append(Param("output_layer.weight", (), (vocab, hidden), 0, stage=pp - 1))
    return out


def build(
    params: list[Param],
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    bucket_size: int | None = None,
    layout: str = "dp_reshardable",
    seed: int = 0,
) -> Checkpoint:
    """A checkpoint of these parameters; `layout` is dp_reshardable, bucket_1d, bucket_2d or coalesced."""
    rng = np.random.default_rng(seed)
    files = MemoryFiles()
    values = {p: _values(p, rng) for p in params}
    tensors = _weights(files, params, {p: v["param"] for p, v in values.items()}, tp)
    truth = {(k if k != "param" else "master", p.key, p.lead): v[k] for p, v in values.items() for k in KINDS}
    made = Checkpoint(files, Catalog("memory", tensors, {}), {}, truth)
    for stage in range(pp):
        for rank in range(tp):
            group = rank + tp * stage
            shards = [(p, {k: _shard(p, values[p][k], rank, tp) for k in KINDS})
                      for p in reversed(params) if p.stage == stage]  # fmt: skip
            made.numels[0, group] = [[]]
            for fp8 in (False, True):
                if some := [s for s in shards if bool(s[0].fp8) == fp8]:
                    buckets = _into_buckets(some, bucket_size)
                    _add_buffer(made, group, buckets, tensors, dp=dp, layout=layout, rng=rng)
    return made


def _values(p: Param, rng: np.random.Generator) -> dict[str, Bits]:
    """Masters within half a unit of a bf16 value, so that they round to it; any moments."""
    sign, exponent, mantissa = (rng.integers(0, n, p.shape, np.uint32) for n in (2, 20, 128))
    rounded = np.full(p.shape, 0x3F80, np.uint32) if p.ones else sign << 15 | (exponent + 110) << 7 | mantissa
    noise = rng.integers(-0x7FFF, 0x8000, p.shape).astype(np.uint32)
    moments = {k: rng.integers(0, 1 << 32, p.shape, np.uint32) for k in KINDS[1:]}
    if p.fp8:
        return {"param": rng.normal(0, 0.02, p.shape).astype(np.float32).view(np.uint32), **moments}
    return {"param": (rounded << np.uint32(16)) + noise, **moments}


def _shard(p: Param, full: Bits, rank: int, tp: int) -> Bits:
    """The live shard of one tensor-parallel rank, flat."""
    if p.tp_axis is None:
        return full.reshape(-1)
    halves = np.split(full, 2, 0) if p.gated else [full]
    return np.concatenate([np.split(h, tp, p.tp_axis)[rank] for h in halves], 0).reshape(-1)


def _weights(
    files: MemoryFiles, params: list[Param], masters: dict[Param, Bits], tp: int
) -> dict[str, TensorEntry]:
    chunks: dict[str, list[Chunk]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for p in params:
        master = masters[p]
        axis, parts = (0, 1) if p.tp_axis is None else (p.tp_axis, tp * (2 if p.gated else 1))
        size = p.shape[axis] // parts
        for i in range(parts):
            start = tuple(i * size if d == axis else 0 for d in range(len(p.shape)))
            box = Box(start, tuple(size if d == axis else n for d, n in enumerate(p.shape)))
            part = master[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
            part = _through_fp8(part, p.fp8) if p.fp8 else part
            part = ((part.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)  # |noise| < 0x8000: no ties
            item = files.add("weights", np.ascontiguousarray(part))
            lead_ones = (1,) * len(p.lead)
            chunks.setdefault(p.key, []).append(Chunk(Box(p.lead + box.start, lead_ones + box.size), item))
        lead = tuple(
            max(a, b) for a, b in zip((i + 1 for i in p.lead), shapes.get(p.key, p.lead), strict=False)
        )
        shapes[p.key] = lead + p.shape
    return {k: TensorEntry(k, "bfloat16", shapes[k], tuple(c)) for k, c in chunks.items()}


def _through_fp8(bits: Bits, width: int) -> Bits:
    """Masters as Transformer Engine keeps them: through bf16, by a scale to E4M3 and back."""
    masters = torch.from_numpy(bits.view(np.float32)).bfloat16().float()
    blocks = masters.reshape(1, -1) if width < 0 else masters.reshape(-1, width)
    scale = 448 / blocks.abs().amax(1, keepdim=True)
    scale = scale if width < 0 else torch.exp2(scale.log2().floor())
    found = (blocks * scale).to(torch.float8_e4m3fn).float() * (1 / scale)
    return found.bfloat16().float().reshape(bits.shape).numpy().view(np.uint32)


Shards = list[tuple[Param, dict[str, Bits]]]


def _into_buckets(shards: Shards, bucket_size: int | None) -> list[list[tuple[int, Param, dict[str, Bits]]]]:
    """Start, parameter and values of each, bucket by bucket: starts at multiples of 64, closed when full."""
    buckets: list[list[tuple[int, Param, dict[str, Bits]]]] = [[]]
    at = 0
    for p, values in shards:
        if bucket_size is not None and at >= bucket_size:
            buckets.append([])
            at = 0
        at = -(-at // 64) * 64
        buckets[-1].append((at, p, values))
        at += values["param"].size
    return buckets


def _add_buffer(
    made: Checkpoint,
    group: int,
    buckets: list[list[tuple[int, Param, dict[str, Bits]]]],
    tensors: dict[str, TensorEntry],
    *,
    dp: int,
    layout: str,
    rng: np.random.Generator,
) -> None:
    joined: dict[str, list[Bits]] = {k: [] for k in KINDS}
    sizes = []
    dtype = "uint8" if buckets[0][0][1].fp8 else "bfloat16"
    gbuf = len(made.numels[0, group][0])
    for index, bucket in enumerate(buckets):
        name = (
            f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{gbuf}.dtype_(torch.{dtype}, torch.float32)"
            f".bucket_idx_{index}"
        )
        numel = bucket[-1][0] + bucket[-1][2]["param"].size
        pad = math.lcm(dp, 128)
        padded = -(-numel // pad) * pad
        sizes.append(numel)
        edges = {0, padded} | {i * padded // dp for i in range(dp)}
        for start, p, values in bucket:
            edges |= {start, start + values["param"].size}
            made.stretches[group, p.key, p.lead] = (name, start, values["param"].size)
        stored = numel if layout == "dp_reshardable" else padded
        for kind in KINDS:
            flat = rng.integers(0, 1 << 32, padded, np.uint32)  # padding holds anything
            if layout == "coalesced":
                flat[:] = 0
            for start, _, values in bucket:
                flat[start : start + values[kind].size] = values[kind]
            joined[kind].append(flat[:numel])
            if layout != "coalesced":
                key = f"{name}.{kind}"
                cuts = sorted(e for e in edges if e <= stored)
                tensors[key] = _bucket_entry(made.files, key, flat[:stored], cuts, dp=dp, layout=layout)
    if layout == "coalesced":
        made.coalesced.append(
            _joined_buffer(made.files, group, {k: np.concatenate(v) for k, v in joined.items()})
        )
    made.numels[0, group][0].append({(dtype, "float32"): sizes})


def _bucket_entry(
    files: MemoryFiles, key: str, flat: Bits, cuts: list[int], *, dp: int, layout: str
) -> TensorEntry:
    chunks = []
    row = flat.size // dp
    for a, b in itertools.pairwise(cuts):
        box = Box((a // row, a % row), (1, b - a)) if layout == "bucket_2d" else Box((a,), (b - a,))
        chunks.append(Chunk(box, files.add("buckets", flat[a:b])))
    shape = (dp, row) if layout == "bucket_2d" else (flat.size,)
    return TensorEntry(key, "float32", shape, tuple(chunks))


def _joined_buffer(files: MemoryFiles, group: int, flats: dict[str, Bits]) -> Buffer:
    states = {}
    for kind, flat in flats.items():
        chunk = Chunk(full_box(flat.shape), files.add("buckets", flat))
        entry = TensorEntry(f"object{group}.{kind}", "float32", flat.shape, (chunk,))
        states["master" if kind == "param" else kind] = flatten(entry)
    return Buffer(0, group, 0, (Bucket(f"object{group}", "bfloat16", flats["param"].size, states, None),))
