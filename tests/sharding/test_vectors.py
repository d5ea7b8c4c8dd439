"""Every recorded output of the real packages is reproduced; FSDP2 boxes equal torch's own.

The second: `compute_local_shape_and_global_offset` on thousands of random tensors.
"""

import itertools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.model.box import Box
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.sharding.parameters import Parameter
from ckpt_tools.sharding.placement import Placement, chunk_rows
from ckpt_tools.sharding.topology import Topology
from tests.data.pack import unpacked
from tests.sharding.replay import Comparison, parameters_of
from tests.sharding.replay_models import REPLAYS

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


# (records, values) compared: a replay that skips something is found out.
COMPARED = {
    "v1_index": (82, 109552),
    "v1_grouped": (58, 127220),
    "v1_memory": (8, 1920),
    "v2_layout": (64, 61002),
    "e2e": (540, 320376),
    "mcore": (15, 42858),
}
# What a record says about itself or about how it was made, not about a layout.
NOT_COMPARED = {
    "family", "id", "source", "doc", "kind", "layers", "hidden", "heads", "ffn", "vocab", "moe_ffn", "swiglu", "bias",
    "kv", "pos", "norm", "tied", "units", "expert", "sym_fail", "may_fail", "dcp", "optimizer", "opt_sd",
    "rep_as_dtensor", "tp_style", "tensor_model_parallel", "eshard", "adam", "world",
}  # fmt: skip


class Read(dict[str, Any]):
    """A JSON object that remembers which of its keys were asked for."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.asked.update(self)
        return super().items()

    def unread(self) -> Iterator[str]:
        for key, value in super().items():
            if key not in self.asked:
                yield key
            if key in NOT_COMPARED:
                continue
            for below in value if isinstance(value, list) else [value]:
                if isinstance(below, Read):
                    yield from below.unread()


def _vectors() -> Path:
    return Path(os.environ.get("CKPT_TOOLS_VECTORS") or unpacked("vectors"))


def records(family: str) -> list[Any]:
    """All records of one family, in a fixed order."""
    files = sorted((_vectors() / family).glob("*.json"))
    found = [json.loads(file.read_bytes()) for file in files]
    return list(found[0]["records"]) if family == "e2e" else found


def compare(family: str, found: list[Any]) -> tuple[int, int]:
    """Replay records and return how many, and how many values were equal."""
    values = 0
    unread: set[str] = set()
    for record in found:
        comparison = Comparison()
        tracked = json.loads(json.dumps(record), object_hook=Read)
        REPLAYS[family](tracked, comparison)
        assert not comparison.differences, f"{record['id']}: {comparison.differences}"
        values += comparison.values
        if "error" not in record:
            unread.update(tracked.unread())
    assert unread <= NOT_COMPARED, f"not compared: {sorted(unread - NOT_COMPARED)}"
    print(f"{family}: {len(found)} cases, {values} values equal")
    return len(found), values


@pytest.mark.parametrize("family", COMPARED)
def test_every_vector_is_reproduced(family):
    assert compare(family, records(family)) == COMPARED[family]


def test_every_layout_can_be_read_as_every_other():
    """The recorded 9 x 9 matrix of real save and load: what one layout writes covers what another one asks for."""
    matrix = json.loads((_vectors() / "reshard_matrix.json").read_bytes())
    model = next(r for r in records("e2e") if r["id"] == "v1_gpttp_dp2_tp2_no_shard")["input"]["model"]
    order = [p["name"] for p in model["params"]]
    parameters = parameters_of(model["params"], order, model["units"])
    placements = [_of_matrix(parameters, layout) for layout in matrix["layouts"]]
    for save, load, worked in matrix["pairs"]:
        written = [
            (name, box)
            for rank in range(placements[save].topology.world_size)
            for name, box in placements[save].written(rank)
        ]
        for rank in range(placements[load].topology.world_size):
            for name, box in placements[load].boxes(rank):
                common = (box.intersect(stored) for key, stored in written if key == name)
                assert (sum(c.volume for c in common if c) == box.volume) == worked
    assert len(matrix["pairs"]) == len(list(itertools.product(placements, placements))) == 81


def _of_matrix(parameters: list[Parameter], layout: Any) -> Placement:
    topology = Topology(
        layout["dp_shard"],
        layout["dp_outer"] or 1,
        layout["tp"],
        strategy=layout["strategy"] or "optim_grads_params",
        outer_strategy=layout["outer_strategy"] or "no_shard",
    )
    names: dict[str, LayoutName] = {"v1": "mfsdp-v1", "v2": "mfsdp-v2", "fsdp2": "fsdp2"}
    return Placement(parameters, topology, names[layout["kind"]])


def test_a_difference_is_seen():
    """The replay itself: one changed number in a record makes it fail."""
    record = records("v1_index")[0]
    record["outputs"][0]["items"][-1][0] += 1
    comparison = Comparison()
    REPLAYS["v1_index"](record, comparison)
    assert len(comparison.differences) == 1
