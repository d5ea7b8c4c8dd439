"""A small model under torch's own `fully_shard`, trained and saved by two processes under gloo: what jobs do.

`torchrun --nproc-per-node 2 -m tests.megatron.dcp.sharded_model DIR` writes `DIR/titan`, `DIR/app` and
`DIR/numbered`, one run under three programs' keys, and `DIR/truth.pt`, the whole tensors by name.
`fully_shard` of `tests/data/packed` holds what it wrote (torch 2.13).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.commands.oracle import same_bytes

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Rows that two and three processes do not share evenly, a frozen weight, a buffer, a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, 4)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(3)})
        self.output = nn.Linear(4, 11, bias=False)
        self.frozen = nn.Parameter(torch.linspace(0, 1, 5), requires_grad=False)
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x) + self.frozen.sum()


def sharded(seed: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model cut over all processes, each layer a unit, and its optimizer in two groups."""
    torch.manual_seed(seed)
    model = Decoder()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """So that every state has a value of its own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        tokens = torch.randint(0, 11, (3, 5), generator=generator)
        model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a program gives to `dcp.save` and `dcp.load`."""
    if kind == "titan":  # torchtitan's checkpointer: the model's keys at the top, the optimizer's flattened
        progress = {"step": torch.tensor(2, dtype=torch.int32), "ntokens_seen": torch.tensor(30)}
        return {
            **get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FLATTENED),
            "train_state": progress,
            "lr_scheduler": {"last_epoch": 2},
        }
    if kind == "app":  # the tutorial of torch.distributed.checkpoint
        return {
            "app": {
                "model": get_model_state_dict(model),
                "optim": get_optimizer_state_dict(model, optimizer),
            }
        }
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


KINDS = ("titan", "app", "numbered")


def truth_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every weight and state by name, whole."""
    named = {**get_model_state_dict(model), **get_optimizer_state_dict(model, optimizer, options=FLATTENED)}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in named.items()
        if isinstance(value, torch.Tensor)
    }


def resumed(folder: Path, kind: str) -> list[str]:
    """Names of what a fresh model and optimizer do not have as it was after they loaded a checkpoint."""
    model, optimizer = sharded(seed=8)
    train(model, optimizer, steps=1)
    state = state_of(kind, model, optimizer)
    dcp.load(state, checkpoint_id=str(folder / kind))
    if kind == "titan":
        names = get_model_state_dict(model)
        weights = {name: state[name] for name in names}
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"],
                       options=FLATTENED)  # fmt: skip
    elif kind == "app":
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["app"]["model"],
            optim_state_dict=state["app"]["optim"],
        )
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    truth = torch.load(folder / "truth.pt", weights_only=True)
    found = truth_of(model, optimizer)
    assert found.keys() == truth.keys()
    return [name for name in truth if not same_bytes(found[name], truth[name])]


def resume(folder: Path) -> None:
    wrong = {kind: resumed(folder, kind) for kind in KINDS}
    if dist.get_rank() == 0:
        (folder / "resumed.json").write_text(json.dumps(wrong))


def main(folder: str, what: str = "save") -> None:
    dist.init_process_group("gloo")
    if what == "resume":
        resume(Path(folder))
        dist.barrier()
        return
    model, optimizer = sharded()
    train(model, optimizer)
    for kind in KINDS:
        dcp.save(state_of(kind, model, optimizer), checkpoint_id=str(Path(folder, kind)))
    truth = truth_of(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(truth, Path(folder, "truth.pt"))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(
        0
    )  # a loaded machine has seen torch abort in the threads that it leaves to the interpreter's end
