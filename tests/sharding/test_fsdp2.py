"""FSDP2 boxes equal torch's own: `compute_local_shape_and_global_offset` on thousands of random tensors."""

import random

import pytest

from ckpt_tools.model.box import Box
from ckpt_tools.sharding.parameters import Parameter
from ckpt_tools.sharding.placement import Placement, chunk_rows
from ckpt_tools.sharding.topology import Topology

torch_utils = pytest.importorskip("torch.distributed.tensor._utils")
if not hasattr(torch_utils, "_compute_local_shape_and_global_offset"):
    pytest.skip("this torch computes boxes only from a process group's mesh", allow_module_level=True)


def torch_box(p: Parameter, topology: Topology, rank: int) -> Box:
    """What torch says of a DTensor of FSDP2's placements."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    at = topology.coordinates(rank)
    if p.tp_dim is None:
        mesh, coordinate, placements = [topology.shard_size], [at.shard], [Shard(0)]
    else:
        outer = _StridedShard(0, split_factor=topology.tp) if p.tp_dim == 0 else Shard(0)
        mesh, coordinate = [topology.shard_size, topology.tp], [at.shard, at.tp]
        placements = [outer, Shard(p.tp_dim)]
    if topology.dp_outer > 1:
        mesh, coordinate = [topology.dp_outer, *mesh], [at.outer, *coordinate]
        placements = [Replicate(), *placements]
    size, start = torch_utils._compute_local_shape_and_global_offset(p.shape, mesh, coordinate, placements)
    return Box(tuple(start), tuple(size))


def test_thousands_of_random_tensors_are_cut_as_torch_cuts_them():
    rng = random.Random(7)
    compared = empty = 0
    for _ in range(700):
        tp = rng.choice([1, 1, 2, 3, 4])
        topology = Topology(rng.choice([1, 2, 3, 5, 8]), rng.choice([1, 1, 2]), tp)
        shape = [rng.choice([1, 2, 3, 5, 7, 9, 16, 31]) for _ in range(rng.randint(1, 3))]
        tp_dim = rng.choice([None, *range(len(shape))])
        if tp_dim is not None:
            shape[tp_dim] *= tp
        p = Parameter("w", tuple(shape), "bfloat16", tp_dim)
        placement = Placement([p], topology, "fsdp2")
        for rank in range(topology.world_size):
            ((_, box),) = placement.shards(rank)
            expected = torch_box(p, topology, rank)
            assert box.size == expected.size
            if box.is_empty:  # torch puts empty shards past the end, wherever they are
                empty += 1
            else:
                assert box.start == expected.start
            compared += 1
    print(f"{compared} boxes equal to torch's, {empty} of them empty")
    assert compared > 5000 and empty > 500


def test_chunks_are_those_of_torch_chunk():
    import torch

    assert [chunk_rows(9, 8, i) for i in range(8)] == [
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 8),
        (8, 9),
        (9, 9),
        (9, 9),
        (9, 9),
    ]
    for rows in range(1, 40):
        for parts in range(1, 12):
            cuts = [chunk_rows(rows, parts, i) for i in range(parts)]
            chunks = [list(c) for c in torch.chunk(torch.arange(rows), parts)]
            assert [list(range(*cut)) for cut in cuts if cut[0] < cut[1]] == chunks
