"""Checkpoints written here and now by released megatron-core versions, against what their ranks held.

`tests/peers/run` installs the releases; without them these tests are skipped.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.megatron.optimizer_layouts.test_real_checkpoints import assert_equal_to_truth, open_checkpoint
from tests.peers.releases import run_writer

PEERS = Path(os.environ.get("CKPT_TOOLS_PEERS", "absent"))
WRITER = Path(__file__).with_name("write_checkpoint.py")
# 0.13 and 0.14 also name `fully_sharded_bucket_space`, but stop on an assertion of theirs when they save it.
LAYOUTS = {
    "0.13.1": ("fully_sharded_model_space", "dp_zero_gather_scatter"),
    "0.14.0": ("fully_sharded_model_space", "dp_zero_gather_scatter"),
    "0.15.0": ("fully_sharded_model_space", "dp_reshardable", "fully_reshardable"),
    "0.16.1": ("dp_reshardable", "fully_reshardable"),
}
SEED = int(os.environ.get("CKPT_TOOLS_PEER_SEED", "0"))  # another seed draws other topologies
CASES = [(version, layout) for version, layouts in LAYOUTS.items() for layout in layouts]


def draw_case(version: str, layout: str) -> dict[str, Any]:
    """A random topology and model, the same for the same seed."""
    rng = random.Random(f"{SEED} {version} {layout}")
    moe = rng.random() < 0.4
    case = {"tp": 1 if moe else rng.choice([1, 2]), "pp": rng.choice([1, 2]), "dp": rng.choice([1, 2])}
    return case | {
        "ep": rng.choice([1, case["dp"]]) if moe else 1,
        "moe": moe,
        "tied": rng.random() < 0.3,
        "layers": 2 * case["pp"],
        "bucket_size": rng.choice([None, 3000]),
        "layout": layout,
        "seed": SEED,
    }


@pytest.mark.peer
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("version", "layout"), CASES)
def test_states_equal_what_the_ranks_held(version, layout, tmp_path):
    release = PEERS / f"megatron_core-{version}"
    if not release.is_dir():
        pytest.skip(f"megatron-core {version} is not in CKPT_TOOLS_PEERS (tests/peers/run installs it)")
    case = draw_case(version, layout)
    write(release, case, tmp_path)
    save_file(merge(tmp_path, case), tmp_path / "truth.safetensors")
    opened = open_checkpoint(tmp_path)
    assert opened[2] is not None and opened[2].layout == layout, case
    assert_equal_to_truth(tmp_path, opened)


def write(release: Path, case: dict[str, Any], out: Path) -> None:
    """Let a release write a checkpoint and the held shards into `out`."""
    run_writer(WRITER, str(release), case, out)


def merge(out: Path, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Full tensors from the shards of all ranks, named as in the fixtures: `<state>/<live name>`."""
    shards: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    cuts: dict[str, int] = {}
    for path in sorted(out.glob("held_*.pt")):
        for name, record in torch.load(path, weights_only=True).items():
            cuts[name] = record["cut"]
            local = shards.setdefault(name, {}).setdefault(record["tp"], {"model": record["weight"]})
            assert torch.equal(local["model"], record["weight"]), name
            if record["range"] is not None:
                start, stop = record["range"]
                for stored, kind in (
                    ("param", "master"),
                    ("exp_avg", "exp_avg"),
                    ("exp_avg_sq", "exp_avg_sq"),
                ):
                    flat = local.setdefault(kind, torch.full((record["weight"].numel(),), torch.nan))
                    flat[start:stop] = record[stored]
    full = {}
    for name, by_rank in shards.items():
        if name == "output_layer.weight" and case["tied"]:
            continue  # the second copy of the embedding
        for kind in by_rank[0]:
            parts = [by_rank[t][kind].view_as(by_rank[t]["model"]) for t in sorted(by_rank)]
            value = join(parts, cuts[name], gated="linear_fc1.weight" in name)
            assert not value.isnan().any(), (name, kind)
            full[f"{kind}/{name}"] = value.contiguous()
    return full


def join(parts: list[torch.Tensor], cut: int, *, gated: bool) -> torch.Tensor:
    """The shards of all tensor-parallel ranks as one tensor; each gated shard is [gate; up]."""
    if cut < 0 or len(parts) == 1:
        assert all(torch.equal(parts[0], part) for part in parts)
        return parts[0]
    if not gated:
        return torch.cat(parts, cut)
    halves = zip(*(part.chunk(2, 0) for part in parts), strict=True)
    return torch.cat([torch.cat(half, 0) for half in halves], 0)
