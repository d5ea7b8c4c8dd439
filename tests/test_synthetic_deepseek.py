"""The synthetic DeepSeek-V3: its size is the published one, and planning it needs its metadata alone."""

from math import prod

from ckpt_tools.commands.convert.plan import plan_checkpoint
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.plan.build import file_rank
from ckpt_tools.sharding.topology import Topology
from tests.synthetic_deepseek import stored_weights, write_metadata


def test_it_has_671_billion_parameters():
    main = {key: shape for key, (_, shape) in stored_weights(61).items() if not key.startswith("mtp.")}
    assert round(sum(map(prod, main.values())) / 1e9) == 671


def test_five_layers_are_planned_for_128_ranks_without_a_payload(tmp_path):
    write_metadata(tmp_path / "in", layers=5)
    assert not list(tmp_path.rglob("*.distcp"))
    layout = Layout("mfsdp-v1", Topology.of_world(128, ep=64))
    found = plan_checkpoint(str(tmp_path / "in"), layout)
    elements = sum(prod(item.box.size) for item in found.plan.items)
    assert elements == sum(prod(t.shape) for t in found.target.tensors)
    assert len(found.costs) == 128
    assert found.imbalance < 1.2
    alone = plan_checkpoint(str(tmp_path / "in"), layout, rank=77)
    assert list(alone.plan.items) == [item for item in found.plan.items if file_rank(item.file) == 77]
    assert alone.costs == [found.costs[77]]
    assert set(alone.plan.tensors) == {item.key for item in alone.plan.items}
    assert [row.key for row in alone.tensors()] == list(alone.plan.tensors)
    assert len(alone.target.tensors) == len(found.target.tensors)
