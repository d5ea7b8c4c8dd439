"""One rank of a job in which the released megatron-fsdp shards a model by every strategy, under gloo on a CPU.

Streams, events and the like of CUDA are stood in for; what is sharded, and where DCP is told it lies, is the
release's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

SHAPES = {"wide": (7, 10), "tall": (24, 3), "norm": (6,)}


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


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.zeros(13, 4, dtype=torch.bfloat16))
        self.layers = torch.nn.ModuleList([Layer(), Layer()])


def v1(case: dict[str, Any], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

    outer: dict[str, Any] = {}
    if case["outer"] > 1:
        both = mesh["dp_outer", "dp_shard"]._flatten(f"both_{case['name']}")
        outer = {"dp_outer_dim": "dp_outer", "hybrid_fsdp_group": both.get_group()}
    dtype = getattr(torch, case["main_dtype"])
    model = fully_shard_model(
        Model(),
        device_mesh=mesh,
        dp_shard_dim="dp_shard",
        tp_dim="tp",
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=case["strategy"],
        outer_dp_sharding_strategy=case["outer_strategy"],
        device=torch.device("cpu"),
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=dtype),
        **outer,
    )
    return {k.removeprefix("module."): v for k, v in model.state_dict().items()}


def v2(case: dict[str, Any], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    from megatron_fsdp import MixedPrecisionPolicy
    from megatron_fsdp.experimental import Flat, Partial, Placements, Replicate, fully_shard
    from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    letters = {"R": Replicate(), "P": Partial(), "S": Flat()}
    axes = list(range(mesh.ndim))
    kinds = {kind: [letters[c] for c in case[kind]] for kind in ("parameter", "gradient", "optimizer")}
    policy = MixedPrecisionPolicy(main_params_dtype=getattr(torch, case["main_dtype"]))
    model = Model()
    for module in (*model.layers, model):
        fully_shard(module, mesh, Placements(axes, **kinds), policy)
    state = dict(model.state_dict())
    preprocess_state_dict_for_uneven_dtensor(state)
    return state


def main(cases: str, folder: str) -> None:
    stand_in_for_cuda()
    dist.init_process_group("gloo")
    for case in json.loads(Path(cases).read_text()):
        outer, shard = case["outer"], dist.get_world_size() // case["outer"]
        sizes = {"dp_outer": outer, "dp_shard": shard} if outer > 1 else {"dp_shard": shard}
        if case["version"] == 1:
            sizes["tp"] = 1
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        state = (v1 if case["version"] == 1 else v2)(case, mesh)
        out = Path(folder, case["name"])
        dcp.save(state, checkpoint_id=out)
        facts = {
            name: {
                "axes": list(value.device_mesh.mesh_dim_names or ()) if isinstance(value, DTensor) else None,
                "print": [repr(p) for p in value.placements] if isinstance(value, DTensor) else None,
            }
            for name, value in state.items()
        }
        Path(folder, f"{case['name']}.{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torn down, torch's threads now and then abort the process where cores are busy


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(*sys.argv[1:])
