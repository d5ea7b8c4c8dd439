"""`load_dtensors`: a training job's shards straight from a checkpoint, every rank reading its own bytes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpt_tools.commands.convert.to_dtensors import prepare_output
from ckpt_tools.commands.job.conversion import ConvertOptions, Prepared
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.job.placements import Layout, in_reading_order, place_model
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.proof.masters import check_masters
from ckpt_tools.execute.proof.payload_sums import SourceProof
from ckpt_tools.formats.storage.files import AnyPath, Files, path_text
from ckpt_tools.megatron.keys import KEPT, parameter_name
from ckpt_tools.model.box import Box, full_box, row_major_strides
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.model.kernels.casts import raw_dtype
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.model.without_gc import without_gc
from ckpt_tools.sharding.parameters import Parameter, part_boxes, part_names
from ckpt_tools.sharding.placement import MeshAxis, Placement
from ckpt_tools.sharding.topology import Topology
from ckpt_tools.torch_extra import require_torch

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

# What jobs call the axes of a mesh; the sharding room's names come first.
AXES = {
    "dp_outer": ("dp_outer", "dp_replicate", "replicate", "hsdp"),
    "dp_shard": ("dp_shard", "dp_shard_cp", "fsdp", "shard", "dp"),
    "tp": ("tp",),
}
_ALIASES = {alias: axis for axis, aliases in AXES.items() for alias in aliases}


def load_dtensors(
    path: AnyPath,
    mesh: DeviceMesh,
    layout: LayoutName = "mfsdp-v1",
    *,
    ep: int = 1,
    etp: int = 0,
    strategy: str | int = "optim_grads_params",
    outer_strategy: str | int = "no_shard",
    options: ConvertOptions | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors of the `fsdp_dtensor` checkpoint that `path` is or would be converted to, by key; called on every rank.

    Everything a parameter or an optimizer state gives is a DTensor on `mesh` of which this rank holds its own rows,
    on the mesh's device; buffers, Adam's steps and rng states are whole, plain tensors on the CPU. Shards may be
    uneven or empty: each DTensor carries the chunk that `torch.distributed.checkpoint` asks for, so `dcp.save` and
    `dcp.load` work on the result. No file is written, and but for making a mesh no rank waits for another:
    so a rank compares the stored checksums of the payloads that it reads whole (`check_source` of the options) and
    leaves out those of which it holds a part; `verify --content` compares all.

    Args:
        path: a `torch_dist` or `fsdp_dtensor` checkpoint or a plain state dict: root or iteration.
        mesh: all ranks of the job in order, its axes named as in `AXES`; one without names shards over all.
            Context-parallel ranks shard too: flatten them into `dp_shard`.
        layout: the placement: ``mfsdp-v1``, ``mfsdp-v2`` or ``fsdp2``.
        ep, etp: expert parallelism; experts stand on a mesh of their own, made from the same ranks.
        strategy, outer_strategy: see `Topology`.
        options: as for a conversion.

    Raises:
        UsageError: torch is not installed; a mesh with unknown axes, or a layout that is impossible on it.
        Otherwise the errors of `convert_to_fsdp_dtensor` up to its plan, and of reading.
    """
    require_torch("load_dtensors")
    path = path_text(path)
    if layout == "even":
        raise UsageError("layout even says how files are cut, not what a job holds; choose another layout")
    topology = Topology(
        **mesh_axes(mesh.mesh_dim_names, tuple(mesh.mesh.shape)),
        ep=ep,
        etp=etp,
        strategy=strategy,
        outer_strategy=outer_strategy,
    )
    wanted = replace(options or ConvertOptions(), keep_plain=True)
    with open_checkpoint(path, wanted.iteration, wanted.trust_pickle, of_run=True) as opened:
        with without_gc():
            prepared = prepare_output(opened, wanted, Layout(layout, topology))
        core = place_model(prepared.live_model(), Layout(layout, topology))
        check_rank_masters(opened.files, prepared, wanted, _rank(mesh), mesh.size())
        proof = SourceProof() if wanted.write.check_source == "all" else None
        with closing(BoxReader(opened.files, prepared.catalog, proof)) as reader:
            return _load(prepared, core, _rank(mesh), _meshes(mesh, topology), reader)


def check_rank_masters(
    files: Files, prepared: Prepared, options: ConvertOptions, rank: int, world: int
) -> None:
    """This rank's share of the masters must round to the stored weights, as for a conversion."""
    mine = prepared.must_round[rank::world]
    advice = "TargetOptions(weights_only=True, dtype=...) with the type of the stored weights takes those."
    check_masters(
        files,
        prepared.catalog,
        mine,
        options.check_masters,
        fp8_recipe=prepared.fp8_recipe,
        advice=advice,
    )


def mesh_axes(names: Sequence[str] | None, shape: Sequence[int]) -> dict[str, int]:
    """Sizes of the topology's axes on a mesh."""
    if names is None:
        if len(shape) != 1:
            raise UsageError(f"a mesh of shape {tuple(shape)} needs names for its axes: {_known_axes()}")
        return {"dp_shard": shape[0]}
    found = [_ALIASES.get(name) for name in names]
    order = [axis for axis in AXES if axis in found]
    if found != order:
        raise UsageError(
            f"mesh axes {tuple(names)}: expected some of {_known_axes()}, each once and in this order (tensor "
            "parallelism innermost)"
        )
    return {"dp_shard": 1} | dict(zip(order, shape, strict=True))


def _known_axes() -> str:
    return ", ".join(
        f"{axis} (or {', '.join(others)})" if others else axis for axis, *others in AXES.values()
    )


def _rank(mesh: DeviceMesh) -> int:
    """This process's number in the mesh."""
    import torch

    ranks = mesh.mesh.flatten().tolist()
    here = torch.distributed.get_rank()
    if here not in ranks:
        raise UsageError(f"rank {here} is not in the mesh of ranks {ranks}")
    return int(ranks.index(here))


class _Mesh(NamedTuple):
    """A mesh of all ranks, and what it calls the axes of `Placement.mesh`; no names for a mesh of one axis."""

    whole: DeviceMesh
    names: Mapping[str, str]

    def of(self, axes: Sequence[MeshAxis]) -> DeviceMesh:
        """The part of the mesh that the DTensors of a parameter with these axes span."""
        wanted = tuple(self.names[axis.name] for axis in axes if self.names)
        return self.whole if wanted in ((), self.whole.mesh_dim_names) else self.whole[wanted]


def _meshes(mesh: DeviceMesh, topology: Topology) -> dict[bool, _Mesh]:
    """The mesh of dense and of expert parameters, by `is_expert`; collective when they differ."""
    from torch.distributed.device_mesh import DeviceMesh

    t = topology
    dense = _Mesh(mesh, {_ALIASES[name]: name for name in mesh.mesh_dim_names or ()})
    if t.ep == 1 and t.etp == t.tp:
        return {False: dense, True: dense}
    sizes = {"dp_outer": t.dp_outer, "dp_shard": t.expert_shard_size, "ep": t.ep, "tp": t.etp}
    ranks = mesh.mesh.reshape(tuple(sizes.values()))
    expert = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=tuple(sizes))
    return {False: dense, True: _Mesh(expert, {name: name for name in sizes})}


def _load(
    prepared: Prepared,
    core: Placement,
    rank: int,
    meshes: Mapping[bool, _Mesh],
    reader: BoxReader,
) -> dict[str, torch.Tensor]:
    """All tensors of one rank, in the order in which Megatron asks for them."""
    owner = {name: p for p in core.parameters for name in part_names(p)}
    held = _held(core, rank)
    elsewhere = owner.keys() - held.keys()  # experts of other ranks
    tensors: dict[str, torch.Tensor] = {
        t.key: inline_tensor(t) for t in prepared.target.inline if parameter_name(t.key) not in elsewhere
    }
    for target in in_reading_order(prepared.target, core.names()).tensors:
        parameter = owner.get(target.parameter)
        if parameter_name(target.key) in elsewhere or target.key.startswith(KEPT):
            continue
        if parameter is None or parameter.buffer:
            tensors[target.key] = to_torch(reader.read(target, full_box(target.shape)), target.dtype)
        else:
            box = held[target.parameter]
            local = to_torch(reader.read(target, box), target.dtype)
            tensors[target.key] = _dtensor(target, parameter, box, local, core, meshes)
    return tensors


def _held(core: Placement, rank: int) -> dict[str, Box]:
    """The box of `rank` in every checkpoint tensor that it has a share in, empty shares included."""
    held: dict[str, Box] = {}
    for parameter, box in core.shards(rank):
        for name in part_names(parameter):
            held[name] = Box((0,) * len(box.start), (0, *box.size[1:]))
        held |= dict(part_boxes(parameter, core.topology, box))
    return held


def _dtensor(
    target: TargetTensor,
    parameter: Parameter,
    box: Box,
    local: torch.Tensor,
    core: Placement,
    meshes: Mapping[bool, _Mesh],
) -> torch.Tensor:
    import torch
    from torch.distributed.tensor import DTensor

    mesh = meshes[parameter.is_expert].of(core.mesh(parameter))
    placed = DTensor.from_local(
        local.to(mesh.device_type),
        mesh,
        _placements(core, parameter),
        run_check=False,
        shape=torch.Size(target.shape),
        stride=row_major_strides(target.shape),
    )
    attach_chunk(placed, box)
    return placed


def _placements(core: Placement, parameter: Parameter) -> list[Any]:
    """torch's word for each axis of the mesh; they do not give the box of an uneven shard."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[Any] = []
    for axis in core.mesh(parameter):
        if axis.dim is None:
            found.append(Replicate())
        elif core.layout == "fsdp2" and axis.name == "dp_shard" and parameter.tp_dim == 0:
            tp = parameter.tp_size(core.topology)
            found.append(_StridedShard(0, split_factor=tp) if tp > 1 else Shard(0))
        else:
            found.append(Shard(axis.dim))
    return found


def attach_chunk(tensor: Any, box: Box) -> None:
    """Tell `torch.distributed.checkpoint` which box of the whole tensor this rank's shard of a DTensor is.

    torch derives it from the placements, which is right for even shards only; it asks the local tensor first
    (DTensor `__create_chunk_list__`, `__create_write_items__`). An empty shard is neither saved nor loaded.
    """
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunks = [] if box.is_empty else [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))]

    def write_items(name: str, shard: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(shard.to_local())
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, shard.size()),
            )
            for chunk in chunks
        ]

    local = tensor._local_tensor
    local.__create_chunk_list__ = lambda: chunks
    local.__create_write_items__ = write_items


def to_torch(values: Any, dtype: str) -> torch.Tensor:
    """A numpy array (see `casts.numpy_dtype`) as a tensor of element type `dtype`, without a copy."""
    import torch

    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat).view(getattr(torch, dtype)).reshape(values.shape)


def inline_tensor(tensor: InlineTensor) -> torch.Tensor:
    bits = np.frombuffer(tensor.data, raw_dtype(tensor.dtype)).copy().reshape(tensor.shape)
    return to_torch(bits, tensor.dtype)
