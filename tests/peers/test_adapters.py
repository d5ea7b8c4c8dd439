"""Adapters written here and now by released Megatron-Bridge, merged: what the wrapped linears compute, bit for bit.

`tests/peers/run` installs the releases; without them these tests are skipped.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools.commands.edit.merge_adapter import MergeOptions, merge_adapter
from tests.commands import oracle
from tests.peers.releases import run_writer
from tests.peers.test_optimizer_layouts import PEERS, join

WRITER = Path(__file__).with_name("write_adapter.py")
CORE, BRIDGE = PEERS / "megatron_core-0.16.1", PEERS / "megatron_bridge-0.3.1"


def write(case: dict[str, Any], out: Path) -> None:
    """Let the releases write the three checkpoints into `out`."""
    run_writer(WRITER, f"{CORE}{os.pathsep}{BRIDGE}", case, out)


@pytest.mark.peer
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "tp", "gated"),
    [
        ("LoRA", 1, True),
        ("LoRA", 2, True),
        ("LoRA", 2, False),
        ("CanonicalLoRA", 1, True),
        ("CanonicalLoRA", 2, True),
    ],
)
def test_a_merged_weight_is_what_its_linear_computes(kind, tp, gated, tmp_path):
    for release in (CORE, BRIDGE):
        if not release.is_dir():
            pytest.skip(f"{release.name} is not in CKPT_TOOLS_PEERS (tests/peers/run installs it)")
    write({"kind": kind, "tp": tp, "gated": gated}, tmp_path)
    options = MergeOptions(alpha=8)
    merge_adapter(str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "merged"), options)
    merge_adapter(str(tmp_path / "wrapped"), None, str(tmp_path / "unwrapped"), options)
    ranks = [torch.load(tmp_path / f"computed_{rank}.pt") for rank in range(tp)]
    before, apart, together = (oracle.tensors(tmp_path / name) for name in ("base", "merged", "unwrapped"))
    assert apart.keys() == together.keys() == before.keys()
    changed = set()
    for name in ranks[0]:
        layer, key = int(name.split(".")[2]), ".".join(name.split(".")[:2] + name.split(".")[3:])
        parts = [rank[name]["rows"] for rank in ranks]
        expected = join(parts, 0 if ranks[0][name]["cut"] else -1, gated=gated and "linear_fc1" in name)
        for found in (apart, together):
            assert oracle.same_bytes(found[key][layer], expected), name
        assert not torch.equal(before[key][layer], expected)
        changed.add(key)
    assert len(changed) == 4
    for key in before.keys() - changed:
        assert oracle.same_bytes(apart[key], before[key]), key
