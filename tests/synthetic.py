"""Synthetic checkpoints of any size, written one chunk at a time: `python -m tests.synthetic OUT --gib 2`.

The big one is a Llama-like model as Megatron core 0.16 stores it with `fully_reshardable` optimizer states: stacked
layers, bf16 weights, fp32 masters that round to them, Adam moments, `common.pt`, `metadata.json`, tensor-parallel
chunks packed back to back. `tests/test_synthetic.py` reads it with stock DCP.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ckpt_tools.box import Box, full_box
from ckpt_tools.catalog.pickling import dump_archive
from ckpt_tools.execute.casts import Array, cast, raw_dtype
from ckpt_tools.execute.dcp_metadata import metadata_bytes
from ckpt_tools.plan.frames import framed_tensor
from ckpt_tools.plan.model import OutputBlob, OutputItem, Plan, TensorInfo
from tests.strategies import Shape


class DcpFolder:
    """A DCP checkpoint in the making; items are packed without gaps, as the stock writer does."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._sizes: dict[str, int] = {}
        self._items: list[OutputItem] = []
        self._blobs: list[OutputBlob] = []
        self._tensors: dict[str, TensorInfo] = {}

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
        plan = Plan(tuple(self._items), tuple(self._blobs), self._sizes, self._tensors, paths, "")
        (self.folder / ".metadata").write_bytes(metadata_bytes(plan))


class Llama:
    """Shapes of the big model: about `gib` GiB with its optimizer states."""

    def __init__(self, gib: float, tp: int) -> None:
        self.tp = tp
        self.hidden = 128 if gib < 0.25 else 1024 if gib < 4 else 2048
        self.heads, self.groups, self.head_dim, self.vocab = self.hidden // 16, 4, 16, 8 * self.hidden
        self.ffn = 11 * self.hidden // 4
        per_layer = sum(math.prod(shape) for _, shape, _ in self._layer())
        rest = 2 * self.vocab * self.hidden
        self.layers = max(1, round((gib * 2**30 / 14 - rest) / per_layer))

    def _layer(self) -> list[tuple[str, Shape, int | None]]:
        """(name, shape, tensor-parallel dimension) of one layer's parameters."""
        h, qkv = self.hidden, (self.heads + 2 * self.groups) * self.head_dim
        return [
            ("self_attention.linear_qkv.layer_norm_weight", (h,), None),
            ("self_attention.linear_qkv.weight", (qkv, h), 0),
            ("self_attention.linear_proj.weight", (h, self.heads * self.head_dim), 1),
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
        yield "output_layer.weight", (self.vocab, self.hidden), 0

    def chunks(self, key: str, shape: Shape, axis: int | None) -> Iterator[tuple[int, Box]]:
        """(rank, box) of the chunks: one a layer and tensor-parallel rank; gated fc1 is cut in either half."""
        stacked = ".layers." in key
        parts = self.tp if axis is not None else 1
        halves = 2 if key.endswith("linear_fc1.weight") else 1
        for layer in range(shape[0] if stacked else 1):
            for rank in range(parts):
                for half in range(halves):
                    start, size = [0] * len(shape), list(shape)
                    if stacked:
                        start[0], size[0] = layer, 1
                    if axis is not None:
                        size[axis] = shape[axis] // parts // halves
                        start[axis] = half * (shape[axis] // halves) + rank * size[axis]
                    yield rank, Box(tuple(start), tuple(size))

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
            untie_embeddings_and_output_weights=True,
            transformer_impl="transformer_engine",
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=1,
            expert_model_parallel_size=1,
            num_experts=None,
            bf16=True,
            fp16=False,
            optimizer="adam",
            iteration=100,
        )


def write_llama(folder: Path, gib: float, tp: int = 2, seed: int = 0) -> None:
    """Write the iteration directory `folder` with about `gib` GiB; holds 64 MiB of random numbers and one chunk."""
    model = Llama(gib, tp)
    pool = np.random.default_rng(seed).standard_normal(1 << 24, np.float32)
    out = DcpFolder(folder)
    turn = np.random.default_rng(seed + 1)
    for key, shape, axis in model.parameters():
        for rank, box in model.chunks(key, shape, axis):
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                first = int(turn.integers(len(pool)))
                values = np.take(pool, np.arange(first, first + box.volume), mode="wrap")
                out.chunk(f"optimizer.state.{kind}.{key}", "float32", shape, box, values.tobytes(), rank=rank)
                if kind == "param":
                    weights = cast(values, "float32", "bfloat16")
                    out.chunk(key, "bfloat16", shape, box, weights.tobytes(), rank=rank)
    _write_common(out, model)
    out.finish()


def _write_common(out: DcpFolder, model: Llama) -> None:
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
            "param_state_sharding_type": "fully_reshardable",
        },
        "opt_param_scheduler": {"max_lr": 1e-4, "min_lr": 1e-5, "num_steps": 100},
        "num_floating_point_operations_so_far": 0.0,
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
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
    given = parser.parse_args()
    write_llama(given.out / "iter_0000100", given.gib, given.tp, given.seed)
    (given.out / "latest_checkpointed_iteration.txt").write_text("100")


if __name__ == "__main__":
    main()
