"""Checkpoints that Megatron-FSDP itself wrote: their chunk tables are what `Placement` says."""

from __future__ import annotations

from collections import defaultdict

import pytest

from ckpt_tools.model.box import Box
from ckpt_tools.sharding.placement import Placement
from ckpt_tools.sharding.topology import Topology
from ckpt_tools.sharding.units import LiveTensor, describe
from tests.conftest import fixture_dir

FIXTURES = {
    "core019_llama_tp2_native_fsdp_dtensor": (Topology(tp=2), 51),
    "core019_gpt3_tp2_native_fsdp_dtensor": (Topology(tp=2), 84),
    "core019_moe_dp1_native_fsdp_dtensor": (Topology(), 91),
}
MODEL, STATE = "model.module.", "optimizer.state.module.module.module."


@pytest.mark.parametrize("name", FIXTURES)
def test_chunks_of_native_checkpoints(name: str) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    topology, tensors = FIXTURES[name]
    folder = next(fixture_dir(name).glob("iter_*"))
    stored = {
        key: entry
        for key, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    weights = {key.removeprefix(MODEL): tuple(e.size) for key, e in stored.items() if key.startswith(MODEL)}
    placement = Placement(describe(_live(weights), topology), topology)
    found = defaultdict(list)
    for rank in range(topology.world_size):
        for tensor, box in placement.written(rank):
            found[tensor].append(box)
    compared = 0
    for key, entry in stored.items():
        tensor = key.removeprefix(MODEL).removeprefix(STATE)
        for state in (".exp_avg", ".exp_avg_sq"):  # optimizer states share their parameter's placement
            tensor = tensor.removesuffix(state)
        if tensor not in found:
            assert key.endswith(".step") or not key.startswith((MODEL, STATE))
            continue
        chunks = [Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
        assert sorted(found[tensor]) == sorted(chunks), key
        compared += 1
    assert compared == tensors
    assert set(found) == set(weights)


def _live(weights: dict[str, tuple[int, ...]]) -> list[LiveTensor]:
    """Live tensors of a model of which a checkpoint holds `weights`."""
    live = []
    for name, shape in weights.items():
        if name.endswith("_w"):
            whole = (2 * shape[0], *shape[1:])
            live.append(LiveTensor(name.removesuffix("_w"), whole, "bfloat16", gated=True))
        elif not name.endswith("_v"):
            buffer = name.endswith("expert_bias")
            live.append(LiveTensor(name, shape, "float32" if buffer else "bfloat16", buffer=buffer))
    return live
