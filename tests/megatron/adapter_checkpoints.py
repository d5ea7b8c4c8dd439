"""Adapter checkpoints as Megatron-Bridge writes them, chunk by chunk of every tensor-parallel rank.

The numbers of a module's A and B are known here whole, as the running job would gather them; how they are cut into
shards and where a shard stands in the stored tensor follows Bridge (peft/utils.py `ParallelLinearAdapter`) and core
(transformer/mlp.py `apply_swiglu_sharded_factory`), written down a second time.
"""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ckpt_tools.model.box import Box
from tests.synthetic import DcpFolder

RUN_CONFIG = """\
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  gated_linear_unit: {gated}
  tensor_model_parallel_size: {tp}
  expert_model_parallel_size: {ep}
peft:
  _target_: megatron.bridge.peft.{name}
  alpha: {alpha}
  dim: {dim}
"""
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}


@dataclass
class AdapterFolder:
    """What is trained: module (layers left out) -> A and B, each (layers, ...) whole."""

    rank: int = 3
    alpha: float = 6
    tp: int = 1
    ep: int = 1
    gated: bool = True
    dtype: torch.dtype = torch.bfloat16
    name: str = "lora.LoRA"
    seed: int = 0
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def add(self, module: str, lead: tuple[int, ...], out: int, into: int) -> None:
        """Random A and B for a linear of this size."""
        random = torch.Generator().manual_seed(self.seed + len(self.matrices))
        a = torch.randn((*lead, self.rank, into), generator=random).to(self.dtype)
        b = torch.randn((*lead, out, self.rank), generator=random).to(self.dtype)
        self.matrices[module] = a, b

    def delta(self, module: str) -> torch.Tensor:
        """What is added to the weight, exact."""
        a, b = self.matrices[module]
        return self.alpha / self.rank * (b.double() @ a.double())

    def fill(self, folder: DcpFolder) -> None:
        """Put every tensor into a checkpoint."""
        for module, (a, b) in self.matrices.items():
            row_parallel = module.split(".adapter")[0].endswith(("linear_proj", "linear_fc2"))
            self._put(folder, f"{module}.linear_in.weight", a, -1 if row_parallel else -2)
            halves = "linear_fc1" in module
            self._put(folder, f"{module}.linear_out.weight", b, -2, halves and self._is_plain(module), halves)

    def _is_plain(self, module: str) -> bool:
        """Whether a rank holds rows of the gate and of the up half, one behind the other."""
        return self.gated and module.endswith(".adapter")

    def _put(
        self,
        folder: DcpFolder,
        key: str,
        whole: torch.Tensor,
        axis: int,
        gated: bool = False,
        halves: bool = False,
    ) -> None:
        """Shards of every rank; those of an fc1 in two halves, each in its half of the stored tensor."""
        axis += whole.ndim
        length, lead = whole.shape[axis], whole.ndim - 2
        ranks = self.tp if length % (self.tp * (2 if halves else 1)) == 0 else 1
        step = length // ranks
        for rank in range(ranks):
            if gated:
                half = step // 2
                gate = whole.narrow(axis, rank * half, half)
                shard = torch.cat([gate, whole.narrow(axis, length // 2 + rank * half, half)], axis)
            else:
                shard = whole.narrow(axis, rank * step, step)
            pieces = [(rank * step, shard)]
            if halves:
                half = step // 2
                pieces = [
                    (rank * half, shard.narrow(axis, 0, half)),
                    (length // 2 + rank * half, shard.narrow(axis, half, half)),
                ]
            for start, piece in pieces:
                for index in itertools.product(*map(range, whole.shape[:lead])):
                    at = [*index, 0, 0]
                    at[axis] = start
                    part = piece[index].contiguous()
                    folder.chunk(
                        key,
                        DTYPES[whole.dtype],
                        tuple(whole.shape),
                        Box(tuple(at), (*(1,) * lead, *part.shape)),
                        part.view(torch.uint8).numpy().tobytes(),
                        rank=rank,
                    )

    def save(self, place: Path) -> Path:
        """An adapter-only iteration directory."""
        folder = DcpFolder(place)
        self.fill(folder)
        folder.object("rng_state/shard_0.0_1.1", [None])
        folder.finish()
        self.finish(place)
        return place

    def finish(self, place: Path) -> None:
        """The small files beside the tensors."""
        (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        text = RUN_CONFIG.format(
            gated=str(self.gated).lower(),
            tp=self.tp,
            ep=self.ep,
            name=self.name,
            alpha=self.alpha,
            dim=self.rank,
        )
        (place / "run_config.yaml").write_text(text)


LAYERS = "decoder.layers."
QKV, PROJ = f"{LAYERS}self_attention.linear_qkv.adapter", f"{LAYERS}self_attention.linear_proj.adapter"
FC1, FC2 = f"{LAYERS}mlp.linear_fc1.adapter", f"{LAYERS}mlp.linear_fc2.adapter"


def lora(**settings: object) -> AdapterFolder:
    """LoRA on every linear of `core019_llama_tp2_fully_reshardable`."""
    made = AdapterFolder(**settings)  # type: ignore[arg-type]
    for module, out, into in ((QKV, 64, 32), (PROJ, 32, 32), (FC1, 128, 32), (FC2, 32, 64)):
        made.add(module, (2,), out, into)
    return made


def canonical(**settings: object) -> AdapterFolder:
    """CanonicalLoRA on the same: queries, keys, values, gate and up have adapters of their own."""
    made = AdapterFolder(**{"name": "canonical_lora.CanonicalLoRA", **settings})  # type: ignore[arg-type]
    for part, out in (("q", 32), ("k", 16), ("v", 16)):
        made.add(f"{QKV}.adapter_{part}", (2,), out, 32)
    for part in ("gate", "up"):
        made.add(f"{FC1}.adapter_{part}", (2,), 64, 32)
    made.add(PROJ, (2,), 32, 32)
    made.add(FC2, (2,), 32, 64)
    return made
