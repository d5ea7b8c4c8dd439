"""Real checkpoints changed into forms that no checkpoint at hand has, by the rules of the format: synthetic sources.

Read and written with stock torch, so that nothing of ours vouches for itself.
"""

import argparse
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.commands import oracle

COMMON = "common_state/shard_0_1"
STATES = ("param", "exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]


@dataclass
class Parts:
    """A `torch_dist` checkpoint in memory. `args` keeps settings of plain types only."""

    tensors: Tensors
    objects: dict[str, Any]
    common: dict[str, Any]

    @property
    def args(self) -> dict[str, Any]:
        return vars(self.common["args"])

    @property
    def groups(self) -> list[dict[str, Any]]:
        optimizer = self.common["optimizer"]
        chain = [optimizer[i] for i in sorted(optimizer)] if 0 in optimizer else [optimizer]
        return [group for one in chain for group in one["optimizer"]["param_groups"]]

    def rename(self, change: Callable[[str], str]) -> None:
        """Another name for every weight, its states included."""
        self.tensors = {
            (f"optimizer.state.{m[1]}.{change(m[2])}" if (m := _STATE.match(key)) else change(key)): tensor
            for key, tensor in self.tensors.items()
        }

    def map(self, weight: str, change: Callable[[torch.Tensor], Tensors]) -> None:
        """Put other tensors in place of a weight and of its states: suffix -> tensor."""
        for prefix in ("", *(f"optimizer.state.{state}." for state in STATES)):
            if f"{prefix}{weight}" in self.tensors:
                made = change(self.tensors.pop(f"{prefix}{weight}"))
                self.tensors |= {f"{prefix}{name}": tensor.clone() for name, tensor in made.items()}

    def add(self, weight: str, shape: tuple[int, ...], trained: bool = True) -> torch.Tensor:
        """A new weight of random values with its states; gives the master."""
        values = {state: torch.rand(shape, generator=_RANDOM) + 0.5 for state in STATES}
        self.tensors[weight] = values["param"].bfloat16()
        if trained:
            self.tensors |= {f"optimizer.state.{state}.{weight}": value for state, value in values.items()}
        return values["param"]


_STATE = re.compile(r"^optimizer\.state\.([^.]+)\.(.+)$")
_RANDOM = torch.Generator().manual_seed(11)


def read(folder: Path) -> Parts:
    """The checkpoint in an iteration directory; what holds classes of Megatron's own is emptied."""
    kinds = oracle.metadata(folder).state_dict_metadata
    keys = [key for key, m in kinds.items() if not isinstance(m, TensorStorageMetadata)]
    emptied = re.compile(r".*_extra_state|rerun_state_machine")
    objects = {key: [None] if emptied.match(key) else oracle.item(folder, key) for key in keys}
    if COMMON in objects:
        del objects[COMMON]
        (common,) = oracle.item(folder, COMMON)
    else:  # core 0.17 and older
        common = torch.load(folder / "common.pt", weights_only=False, pickle_module=oracle.PickleModule)
    common.pop("rerun_state_machine", None)
    plain = {k: v for k, v in vars(common["args"]).items() if isinstance(v, bool | int | float | str | None)}
    common["args"] = argparse.Namespace(**plain)
    return Parts(oracle.tensors(folder), objects, common)


def saved(folder: Path, state: dict[str, Any]) -> Path:
    """A flat state as stock torch writes it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    return folder


def write(folder: Path, parts: Parts) -> Path:
    """The checkpoint as stock torch writes it, with the file that makes it `torch_dist`."""
    saved(folder, {**parts.tensors, **parts.objects})
    torch.save(parts.common, folder / "common.pt")  # stock `save` would make text of its integer keys
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder
