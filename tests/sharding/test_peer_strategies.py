"""Every sharding strategy as the released megatron-fsdp carries it out, v1 and v2: what its checkpoints then hold.

Four gloo processes shard one model by each and save it with stock DCP (`strategies_worker.py`). The chunk tables are
those of `Placement`, the placements of its DTensors those of `Placement.mesh`, and the element type is that of the
main weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.model.box import Box
from ckpt_tools.sharding.parameters import Parameter
from ckpt_tools.sharding.placement import Placement
from ckpt_tools.sharding.topology import Topology
from ckpt_tools.sharding.units import number_units
from tests.sharding.strategies_worker import SHAPES

pytestmark = pytest.mark.peer
PEERS = Path(os.environ.get("CKPT_TOOLS_PEERS", ""))
NEEDED = [PEERS / "megatron_fsdp-0.6.1", PEERS / "einops-0.8.2"]
WORKER = Path(__file__).with_name("strategies_worker.py")
RANKS = 4

V1 = [
    ("no_shard", 1, "no_shard", "float32"),
    ("optim", 1, "no_shard", "float32"),
    ("optim_grads", 1, "no_shard", "float32"),
    ("optim_grads_params", 1, "no_shard", "float32"),
    ("optim_grads_params", 1, "no_shard", "bfloat16"),
    ("optim", 2, "no_shard", "float32"),
    ("optim_grads_params", 2, "no_shard", "float32"),
    ("optim_grads_params", 2, "optim", "float32"),
    ("optim_grads_params", 2, "optim", "bfloat16"),
]
# Placements of parameters, gradients and optimizer along the axes of the mesh, and the strategy that this is.
V2 = [
    ("R", "P", "R", "no_shard", "no_shard"),
    ("R", "P", "S", "optim", "no_shard"),
    ("R", "S", "S", "optim_grads", "no_shard"),
    ("S", "S", "S", "optim_grads_params", "no_shard"),
    ("RS", "PS", "RS", "optim_grads_params", "no_shard"),
    ("RS", "PS", "SS", "optim_grads_params", "optim"),
]


def cases() -> dict[str, dict[str, Any]]:
    found = {}
    for strategy, outer, outer_strategy, dtype in V1:
        name = f"v1_{strategy}_{outer}_{outer_strategy}_{dtype}"
        found[name] = {"version": 1, "outer": outer, "strategy": strategy, "outer_strategy": outer_strategy}
        found[name]["main_dtype"] = dtype
    for parameter, gradient, optimizer, strategy, outer_strategy in V2:
        name = f"v2_{parameter}_{gradient}_{optimizer}"
        found[name] = {"version": 2, "outer": len(parameter), "strategy": strategy, "main_dtype": "float32"}
        found[name] |= {"parameter": parameter, "gradient": gradient, "optimizer": optimizer}
        found[name]["outer_strategy"] = outer_strategy
    return {name: {"name": name, **case} for name, case in found.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of every case, made by one job."""
    absent = [str(folder) for folder in NEEDED if not folder.is_dir()]
    if absent:
        pytest.skip(f"absent: {', '.join(absent)} (tests/peers/run installs them)")
    folder = tmp_path_factory.mktemp("strategies")
    (folder / "cases").write_text(json.dumps(list(cases().values())))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*launcher, str(WORKER), str(folder / "cases"), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*NEEDED, root])), "OMP_NUM_THREADS": "1"},
        cwd=folder, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def placement_of(case: dict[str, Any]) -> Placement:
    shapes: dict[str, tuple[int, ...]] = {"embedding": (13, 4)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}
    no_units = case["version"] == 1 and case["strategy"] == "no_shard"
    units = [] if no_units else ["layers.0", "layers.1"]
    parameters = [
        Parameter(name, shape, "bfloat16", unit=unit)
        for (name, shape), unit in zip(shapes.items(), number_units(list(shapes), units), strict=True)
    ]
    topology = Topology(
        RANKS // case["outer"],
        case["outer"],
        strategy=case["strategy"],
        outer_strategy=case["outer_strategy"],
    )
    return Placement(parameters, topology, "mfsdp-v1" if case["version"] == 1 else "mfsdp-v2")


@pytest.mark.parametrize("name", cases())
def test_what_a_strategy_leaves_in_a_checkpoint(name: str, saved: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    case = cases()[name]
    placement = placement_of(case)
    found = defaultdict(list)
    for rank in range(RANKS):
        for tensor, box in placement.written(rank):
            found[tensor].append(box)
    stored = FileSystemReader(saved / name).read_metadata().state_dict_metadata
    assert set(stored) == set(found)
    for key, entry in stored.items():
        assert sorted(found[key]) == sorted(Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks), key
        assert str(entry.properties.dtype) == f"torch.{case['main_dtype']}"
    facts = json.loads((saved / f"{name}.0.json").read_text())
    for parameter in placement.parameters:
        expected, axes = facts[parameter.name], placement.mesh(parameter)
        assert [axis.name for axis in axes] == expected["axes"]
        printed = ["Replicate()" if axis.dim is None else f"Shard(dim={axis.dim})" for axis in axes]
        assert printed == expected["print"]


def test_some_shards_are_uneven(saved: Path) -> None:
    """Else the cases could not tell a flat buffer from an even cut."""
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(saved / "v1_optim_1_no_shard_float32").read_metadata().state_dict_metadata
    assert any(len({tuple(c.sizes) for c in entry.chunks}) > 1 for entry in stored.values())
