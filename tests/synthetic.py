"""Synthetic checkpoints of any size, written one chunk at a time: `python -m tests.synthetic OUT --gib 2`.

The big one is a Llama-like model as Megatron core stores it: stacked layers, bf16 weights, fp32 masters that round to
them, Adam moments, `common.pt`, `metadata.json`, tensor-parallel chunks packed back to back. `--layout` says how the
optimizer states lie: with their weights (`fully_reshardable`), flattened (`fully_sharded_model_space`) or in buckets
(`dp_reshardable`). `tests/test_synthetic.py` reads them all.
"""

import argparse
import json
import math
import pickle
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from ckpt_tools.formats.dcp.metadata_write import metadata_bytes
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.formats.torch_archive.tensor_template import framed_tensor
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.kernels.casts import Array, cast, raw_dtype
from ckpt_tools.model.transfers import OutputBlob, OutputItem, Plan, TensorInfo
from tests.strategies import Shape

LAYOUTS = ("fully_reshardable", "fully_sharded_model_space", "dp_reshardable")  # of the optimizer states
_KINDS = ("param", "exp_avg", "exp_avg_sq")


class DcpFolder:
    """A DCP checkpoint in the making; items are packed without gaps, as the stock writer does."""

    def __init__(self, folder: Path, is_there: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=is_there)
        self.folder = folder
        self._sizes: dict[str, int] = {}
        self._items: list[OutputItem] = []
        self._blobs: list[OutputBlob] = []
        self._tensors: dict[str, TensorInfo] = {}
        self.original_shapes: dict[str, Shape] | None = None  # `mcore_data`

    def chunk(self, key: str, dtype: str, shape: Shape, box: Box, payload: bytes, *, rank: int = 0) -> None:
        """Add one chunk of a tensor; `payload` holds its row-major bytes."""
        file, offset, length = self._append(framed_tensor(dtype, box.size, payload), rank)
        self._tensors[key] = TensorInfo(dtype, shape)
        self._items.append(OutputItem(key, box, dtype, file, offset, length, ()))

    def tensor(self, key: str, dtype: str, values: Array, boxes: Sequence[Box] | None = None) -> None:
        """Add a whole tensor cut into `boxes`, the i-th in file i % 3."""
        raw = values.view(raw_dtype(dtype))
        for i, box in enumerate([full_box(raw.shape)] if boxes is None else boxes):
            part = raw[tuple(map(slice, box.start, box.stop))]
            self.chunk(key, dtype, raw.shape, box, part.tobytes(), rank=i % 3)

    def object(self, key: str, value: object) -> None:
        """Add a BYTES item."""
        data = dump_archive(value)
        file, offset, _ = self._append(data, 0)
        self._blobs.append(OutputBlob(key, None, file, offset, data))

    def join(self, other: "DcpFolder") -> None:
        """Add what another process has put into other files of the folder."""
        assert not self._sizes.keys() & other._sizes.keys()
        self._sizes |= other._sizes
        self._items += other._items
        self._blobs += other._blobs
        self._tensors |= other._tensors
        if other.original_shapes is not None:
            self.original_shapes = {**(self.original_shapes or {}), **other.original_shapes}

    def _append(self, archive: bytes, rank: int) -> tuple[str, int, int]:
        name = f"__{rank}_0.distcp"
        with open(self.folder / name, "ab") as file:
            file.write(archive)
        end = self._sizes[name] = self._sizes.get(name, 0) + len(archive)
        return name, end - len(archive), len(archive)

    def finish(self) -> None:
        """Write `.metadata`."""
        keys = dict.fromkeys([blob.key for blob in self._blobs] + [item.key for item in self._items])
        paths = {key: (key,) for key in keys}
        plan = Plan(
            tuple(self._items),
            tuple(self._blobs),
            self._sizes,
            self._tensors,
            paths,
            "",
            self.original_shapes,
        )
        (self.folder / ".metadata").write_bytes(metadata_bytes(plan))


class Llama:
    """Shapes of the big model: about `gib` GiB with its optimizer states.

    With a `vocab` of its own the embedding may be most of it; it is then the output layer too. Every of `pp` pipeline
    stages has the files of `tp` ranks.
    """

    def __init__(self, gib: float, tp: int, vocab: int | None = None, pp: int = 1) -> None:
        self.tp, self.pp, self.tied = tp, pp, vocab is not None
        self.hidden = 128 if gib < 0.25 else 1024 if gib < 4 else 2048
        self.heads, self.groups, self.head_dim = self.hidden // 16, 4, 16
        self.vocab = 8 * self.hidden if vocab is None else vocab
        self.ffn = 11 * self.hidden // 4
        per_layer = sum(math.prod(shape) for _, shape, _ in self._layer())
        rest = (1 if self.tied else 2) * self.vocab * self.hidden
        self.layers = max(1, round((gib * 2**30 / 14 - rest) / per_layer))

    def _layer(self) -> list[tuple[str, Shape, int | None]]:
        """(name, shape, tensor-parallel dimension) of one layer's parameters, in order of registration."""
        h, qkv = self.hidden, (self.heads + 2 * self.groups) * self.head_dim
        return [
            ("self_attention.linear_proj.weight", (h, self.heads * self.head_dim), 1),
            ("self_attention.linear_qkv.layer_norm_weight", (h,), None),
            ("self_attention.linear_qkv.weight", (qkv, h), 0),
            ("mlp.linear_fc1.layer_norm_weight", (h,), None),
            ("mlp.linear_fc1.weight", (2 * self.ffn, h), 0),
            ("mlp.linear_fc2.weight", (h, self.ffn), 1),
        ]

    def parameters(self) -> Iterator[tuple[str, Shape, int | None]]:
        """(key, stored shape, tensor-parallel dimension) of every stored parameter."""
        yield "embedding.word_embeddings.weight", (self.vocab, self.hidden), 0
        for name, shape, axis in self._layer():
            yield f"decoder.layers.{name}", (self.layers, *shape), None if axis is None else axis + 1
        yield "decoder.final_layernorm.weight", (self.hidden,), None
        if not self.tied:
            yield "output_layer.weight", (self.vocab, self.hidden), 0

    def chunks(self, key: str, shape: Shape, axis: int | None) -> Iterator[tuple[int, Box]]:
        """(rank, box) of the chunks: one a layer and tensor-parallel rank; gated fc1 is cut in either half."""
        stacked = ".layers." in key
        parts = self.tp if axis is not None else 1
        halves = 2 if key.endswith("linear_fc1.weight") else 1
        last = self.pp - 1 if key.startswith(("decoder.final", "output_layer")) else 0
        for layer in range(shape[0] if stacked else 1):
            stage = layer * self.pp // self.layers if stacked else last
            for rank in range(parts):
                for half in range(halves):
                    start, size = [0] * len(shape), list(shape)
                    if stacked:
                        start[0], size[0] = layer, 1
                    if axis is not None:
                        size[axis] = shape[axis] // parts // halves
                        start[axis] = half * (shape[axis] // halves) + rank * size[axis]
                    yield stage * self.tp + rank, Box(tuple(start), tuple(size))

    def args(self) -> argparse.Namespace:
        """What a training job would have stored as its arguments."""
        return argparse.Namespace(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            num_attention_heads=self.heads,
            group_query_attention=True,
            num_query_groups=self.groups,
            kv_channels=self.head_dim,
            padded_vocab_size=self.vocab,
            swiglu=True,
            add_bias_linear=False,
            normalization="RMSNorm",
            position_embedding_type="rope",
            untie_embeddings_and_output_weights=not self.tied,
            transformer_impl="transformer_engine",
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            expert_model_parallel_size=1,
            num_experts=None,
            bf16=True,
            fp16=False,
            optimizer="adam",
            iteration=100,
        )


class _Numbers:
    """Elements of a weight or state chunk: some stretch of 64 MiB of random numbers, the same in every layout."""

    def __init__(self, seed: int) -> None:
        self._pool = np.random.default_rng(seed).standard_normal(1 << 24, np.float32)

    def of(self, kind: str, key: str, box: Box) -> Array:
        """Row-major float32 elements; `param` ones are the masters of the weights."""
        first = zlib.crc32(f"{kind} {key} {box.start}".encode()) % len(self._pool)
        wrapped = [self._pool[first:], *[self._pool] * (box.volume // len(self._pool)), self._pool[:first]]
        return (
            np.concatenate(wrapped)[: box.volume]
            if first + box.volume > len(self._pool)
            else (self._pool[first : first + box.volume])
        )


def write_llama(
    folder: Path,
    gib: float,
    tp: int = 2,
    seed: int = 0,
    layout: str = LAYOUTS[0],
    vocab: int | None = None,
    pp: int = 1,
) -> None:
    """Write the iteration directory `folder` with about `gib` GiB; holds 64 MiB of random numbers and one chunk.

    Each of several pipeline stages is written by a process of its own.
    """
    model, out = Llama(gib, tp, vocab, pp), DcpFolder(folder)
    if pp == 1:
        _write_stage(out, model, seed, layout, 0)
    else:
        assert layout != "dp_reshardable"  # whose buckets are those of one stage
        with ProcessPoolExecutor(pp) as pool:
            some = [
                pool.submit(_write_stage, DcpFolder(folder, is_there=True), model, seed, layout, n)
                for n in range(pp)
            ]
            for one in some:
                out.join(one.result())
    _write_common(out, model, layout)
    out.finish()


def _write_stage(out: DcpFolder, model: Llama, seed: int, layout: str, stage: int) -> DcpFolder:
    """The chunks of one pipeline stage."""
    numbers = _Numbers(seed)
    for key, shape, axis in model.parameters():
        for rank, box in model.chunks(key, shape, axis):
            if rank // model.tp == stage:
                weights = cast(numbers.of("param", key, box), "float32", "bfloat16")
                out.chunk(key, "bfloat16", shape, box, weights.tobytes(), rank=rank)
    if layout == "dp_reshardable":
        _write_buckets(out, model, numbers)
    else:
        _write_states(out, model, numbers, layout == "fully_sharded_model_space", stage)
    return out


def _write_states(out: DcpFolder, model: Llama, numbers: _Numbers, flattened: bool, stage: int) -> None:
    """One tensor a weight and kind; flattened, every chunk is one row, cut in two for two data-parallel ranks."""
    out.original_shapes = {} if flattened else None
    for kind in _KINDS:
        for key, shape, axis in model.parameters():
            state = f"optimizer.state.{kind}.{key}"
            for rank, box in model.chunks(key, shape, axis):
                if rank // model.tp != stage:
                    continue
                values = numbers.of(kind, key, box)
                if not flattened:
                    out.chunk(state, "float32", shape, box, values.tobytes(), rank=rank)
                    continue
                assert out.original_shapes is not None
                out.original_shapes[state] = shape
                grid = tuple(n // part for n, part in zip(shape, box.size, strict=True))
                cell = tuple(a // part for a, part in zip(box.start, box.size, strict=True))
                half = box.volume // 2
                for at in (0, half):
                    row = Box((*cell, at), (*(1,) * len(cell), half))
                    part = values[at : at + half].tobytes()
                    out.chunk(state, "float32", (*grid, box.volume), row, part, rank=rank)


def _write_buckets(out: DcpFolder, model: Llama, numbers: _Numbers) -> None:
    """One buffer of one bucket a tensor-parallel rank: its parts of the parameters in reverse order, a chunk each."""
    for group in range(model.tp):
        held: dict[
            tuple[int, int, int], list[tuple[str, Box]]
        ] = {}  # by order of registration; gate before up
        for number, (key, shape, axis) in enumerate(model.parameters()):
            for rank, box in model.chunks(key, shape, axis):
                if axis is None or rank == group:
                    place = (1, box.start[0]) if ".layers." in key else (2 if number else 0, 0)
                    held.setdefault((*place, number), []).append((key, box))
        numel = sum(box.volume for parts in held.values() for _, box in parts)
        assert all(
            box.volume % 64 == 0 for parts in held.values() for _, box in parts
        )  # so there is no padding
        name = f"optimizer.distributed.dp_group_idx_{group}"
        bucket = f"{name}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
        for kind in _KINDS:
            at = 0
            for _, parts in sorted(held.items(), reverse=True):
                values = np.concatenate([numbers.of(kind, key, box) for key, box in parts])
                box = Box((at,), values.shape)
                out.chunk(f"{bucket}.{kind}", "float32", (numel,), box, values.tobytes(), rank=group)
                at += len(values)
        out.object(f"{name}.per_bucket_numel_unpadded/shard_0_1", [[{("bfloat16", "float32"): [numel]}]])


def write_storm(folder: Path, layers: int = 10_000) -> None:
    """Write an iteration directory of nothing but norms: two items of 4 KiB for every layer."""
    model, numbers, out = Llama(0.001, tp=1), _Numbers(0), DcpFolder(folder)
    model.layers, model.hidden = layers, 2048
    for name in ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"):
        key = f"decoder.layers.{name}"
        for layer in range(layers):
            box = Box((layer, 0), (1, model.hidden))
            weights = cast(numbers.of("param", key, box), "float32", "bfloat16")
            out.chunk(key, "bfloat16", (layers, model.hidden), box, weights.tobytes())
    _write_common(out, model, LAYOUTS[0])
    out.finish()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))  # as Megatron leaves it


def _write_common(out: DcpFolder, model: Llama, layout: str) -> None:
    import torch  # only here: the rest of this module serves processes whose memory is measured

    adam = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True, "step": 100}
    mults = {
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "max_lr": 1e-4,
        "min_lr": 1e-5,
    }
    groups = [{"wd_mult": wd, "weight_decay": 0.1 * wd, **adam, **mults} for wd in (1.0, 0.0)]
    common = {
        "args": model.args(),
        "checkpoint_version": 3.0,
        "iteration": 100,
        "optimizer": {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": layout,
        },
        "opt_param_scheduler": {"max_lr": 1e-4, "min_lr": 1e-5, "num_steps": 100},
        "num_floating_point_operations_so_far": 0.0,
        "content_metadata": {"distrib_optim_sharding_type": layout},
    }
    torch.save(common, out.folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (out.folder / "metadata.json").write_text(
        json.dumps({**backend, "common_backend": "torch", "common_backend_version": 1})
    )


def main() -> None:
    """Write OUT/iter_0000100 and the tracker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=(*LAYOUTS, "storm"), default=LAYOUTS[0])
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--pp", type=int, default=1, help="Stages, each with files and a process of its own.")
    given = parser.parse_args()
    iteration = given.out / "iter_0000100"
    if given.layout == "storm":
        write_storm(iteration)
    else:
        write_llama(iteration, given.gib, given.tp, given.seed, given.layout, given.vocab, given.pp)
    (given.out / "latest_checkpointed_iteration.txt").write_text("100")


if __name__ == "__main__":
    main()
