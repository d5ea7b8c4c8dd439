"""One rank of a job that takes its shards from checkpoints; run by torchrun, told what to do by a JSON file.

Everything is judged by stock torch: its reader's whole tensors are the truth, its `load` and `save` the users.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import ckpt_tools
from ckpt_tools.commands.look.load_dtensors import attach_chunk
from ckpt_tools.model.box import Box
from tests.commands import oracle


class CountingReader(FileSystemReader):
    """Stock, but keeps the name of every data file opened and where every item that is read lies."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.opened: list[str] = []
        self.read: list[tuple[str, int]] = []
        self.fs = _CountingFiles(self.opened)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Any:
        return oracle.metadata(Path(self.path))

    def _slice_file(self, file: Any, info: Any) -> Any:
        self.read.append((info.relative_path, info.offset))
        return super()._slice_file(file, info)


class _CountingFiles(FileSystem):
    def __init__(self, opened: list[str]) -> None:
        self._opened = opened

    def create_stream(self, path: Any, mode: str) -> Any:
        self._opened.append(Path(path).name)
        return super().create_stream(path, mode)


def box_of(tensor: DTensor) -> Box | None:
    """Which part of the whole tensor this rank has; None for an empty one."""
    chunks = tensor.__create_chunk_list__()
    return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if chunks else None


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """The same kind of tensor, of the same shard, filled with something else."""
    if not isinstance(tensor, DTensor):
        return torch.full_like(tensor, 77)
    local = torch.full_like(tensor.to_local(), 77)
    other = DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.size(),
        stride=tensor.stride(),
    )
    attach_chunk(other, box_of(tensor) or Box((0,) * local.dim(), tuple(local.shape)))
    return other


def nested(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state dict as Megatron passes it: DCP sorts the outermost keys only."""
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for key, tensor in flat.items():
        section, _, rest = key.partition(".")
        if section == "model":
            state["model"][rest] = tensor
        else:
            name, _, kind = rest.removeprefix("state.").rpartition(".")
            state["optimizer"]["state"].setdefault(name, {})[kind] = tensor
    return state


def differences(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> list[str]:
    """Keys whose bytes are not those of the whole tensors."""
    wrong = []
    for key, tensor in found.items():
        if not isinstance(tensor, DTensor):
            expected, local = truth[key], tensor
        else:
            local = tensor.to_local().cpu()
            box = box_of(tensor)
            if box is None:
                expected = torch.empty((0, *truth[key].shape[1:]), dtype=truth[key].dtype)
            else:
                expected = truth[key][tuple(map(slice, box.start, box.stop))]
            if tuple(tensor.shape) != tuple(truth[key].shape):
                wrong.append(f"{key}: shape")
        if not oracle.same_bytes(local, expected):
            wrong.append(key)
    return wrong


def run(case: dict[str, Any], scratch: Path) -> dict[str, Any]:
    mesh = init_device_mesh(case["device"], tuple(case["mesh"]), mesh_dim_names=tuple(case["axes"]))
    truth = torch.load(case["truth"], weights_only=True)
    options = {"layout": case["layout"], "ep": case.get("ep", 1)}
    loaded = ckpt_tools.load_dtensors(case["source"], mesh, **options)
    shards = {key: t for key, t in loaded.items() if isinstance(t, DTensor)}
    result: dict[str, Any] = {
        "keys": sorted(loaded),
        "shards": len(shards),
        "uneven": sum(t.to_local().shape[0] * t.device_mesh.size(0) != t.shape[0] for t in shards.values()),
        "empty": sum(t.to_local().numel() == 0 for t in shards.values()),
        "elements": sum(t.to_local().numel() for t in shards.values()),
        "wrong": differences(loaded, truth),
    }
    again = ckpt_tools.load_dtensors(case["converted"], mesh, **options)
    result["wrong_from_converted"] = differences(again, truth)
    result["same_keys"] = sorted(k for k in again if isinstance(again[k], DTensor)) == sorted(shards)

    reader = CountingReader(case["converted"])
    template = {key: emptied(t) for key, t in shards.items()}
    dcp.load(nested(template), storage_reader=reader)
    result["wrong_stock"] = differences(template, truth)
    result["opened"] = reader.opened
    result["front_to_back"] = reader.read == sorted(
        reader.read, key=lambda at: (reader.opened.index(at[0]), at[1])
    )

    target = scratch / case["name"]
    dcp.save(loaded, checkpoint_id=str(target))
    back = {key: emptied(t) for key, t in loaded.items()}
    dcp.load(back, checkpoint_id=str(target))
    result["wrong_saved_again"] = differences(back, truth)
    return result


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    warnings.simplefilter("ignore")
    on_gpu = any(case["device"] == "cuda" for case in task["cases"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    results = {case["name"]: run(case, Path(task["scratch"])) for case in task["cases"]}
    Path(task["scratch"], f"result_{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torn down, torch's threads now and then abort the process where cores are busy


if __name__ == "__main__":
    main()
