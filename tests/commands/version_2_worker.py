"""One rank of a job of the released Megatron-FSDP v2 that loads a checkpoint strictly, under gloo on a CPU."""

import contextlib
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh

_UNIT = re.compile(r"decoder\.layers\.\d+")


class Nothing:
    """A stream or event that does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def stand_in_for_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = Nothing
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    cuda.current_device = lambda: 0
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self


def model_of(shapes: dict[str, list[int]]) -> torch.nn.Module:
    """A tree of modules with bf16 parameters of these names."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, torch.nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(leaf, torch.nn.Parameter(torch.full(shape, 7.0, dtype=torch.bfloat16)))
    return root


def main(folder: str, report: str) -> None:
    """Load `model.*` into a model that v2 has sharded, and write down this rank's rows."""
    from megatron_fsdp import MixedPrecisionPolicy
    from megatron_fsdp.experimental import Flat, Placements, fully_shard
    from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    stand_in_for_cuda()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {
        key.removeprefix("model."): list(entry.size)
        for key, entry in stored.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    model = model_of(shapes)
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    units = [module for name, module in model.named_modules() if _UNIT.fullmatch(name)]
    for module in (*units, model):
        fully_shard(module, mesh, Placements([0], [Flat()], [Flat()], [Flat()]), policy)
    state = {"model": dict(model.state_dict())}
    preprocess_state_dict_for_uneven_dtensor(state)
    boxes = {
        name: [list(chunk.offsets) for chunk in value._local_tensor.__create_chunk_list__()]
        for name, value in state["model"].items()
    }
    dcp.load(state, checkpoint_id=folder)
    torch.save(
        {name: value.to_local() for name, value in state["model"].items()}, f"{report}.{dist.get_rank()}.pt"
    )
    Path(f"{report}.{dist.get_rank()}.json").write_text(json.dumps(boxes))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torn down, torch's threads now and then abort the process where cores are busy


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(*sys.argv[1:])
