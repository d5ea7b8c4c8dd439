"""Every recorded output of the real packages is reproduced."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.model.choices import LayoutName
from ckpt_tools.sharding.parameters import Parameter
from ckpt_tools.sharding.placement import Placement
from ckpt_tools.sharding.topology import Topology
from tests.data.pack import unpacked
from tests.sharding.replay import Comparison, parameters_of
from tests.sharding.replay_models import REPLAYS

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
