"""Predicted times: what they are made of, and what holds them up."""

from __future__ import annotations

import pytest

from ckpt_tools.model.box import Box
from ckpt_tools.model.transfers import OutputItem, Plan, TensorInfo
from ckpt_tools.plan.assign import worker_share
from ckpt_tools.plan.duration import Machines, predict

GB = 10**9


def plan_of(*sizes: int) -> Plan:
    """Items of so many bytes each, in one file."""
    items = tuple(
        OutputItem(f"t{i}", Box((0,), (size,)), "uint8", "__0_0.distcp", 0, size, ())
        for i, size in enumerate(sizes)
    )
    return Plan(
        items=items,
        blobs=(),
        tensors={item.key: TensorInfo("uint8", item.box.size) for item in items},
        file_bytes={"__0_0.distcp": sum(sizes)},
        paths={},
        digest="",
    )


def test_a_nodes_disk_is_the_limit_and_nodes_share() -> None:
    plan = plan_of(*[GB] * 640)
    one, eight = (predict(plan, 0, Machines(disk=2 * GB, nodes=n)) for n in (1, 8))
    assert one.moving == pytest.approx(320) and eight.moving == pytest.approx(40)
    assert one.planning == eight.planning  # every node plans all of it
    assert eight.starting > one.starting + 5  # by a launcher, with torch


def test_a_shared_network_is_a_limit_for_all_nodes_together() -> None:
    plan = plan_of(*[GB] * 640)
    assert predict(plan, 0, Machines(disk=2 * GB, nodes=64, network=4 * GB)).moving == pytest.approx(160)


def test_the_speed_to_give_is_that_of_the_slowest_node() -> None:
    plan, speeds = plan_of(*[GB] * 64), (2 * GB, 2 * GB, GB, 2 * GB)
    shares = (worker_share(plan.items, node, len(speeds)) for node in range(len(speeds)))
    ends = [len(share) * GB / speed for share, speed in zip(shares, speeds, strict=True)]
    machines = Machines(disk=min(speeds), nodes=len(speeds), workers=1)
    assert predict(plan, 0, machines).moving == pytest.approx(max(ends)) == 16
    assert sorted(ends)[-2] == 8  # and the others have waited for half of it


def test_one_large_item_holds_up_its_worker() -> None:
    found = predict(plan_of(300 * GB, *[GB] * 15), 0, Machines(disk=1000 * GB))
    assert found.moving == pytest.approx(100, rel=0.01)
    assert found.straggling == pytest.approx(300 / (315 / 16), rel=0.1)


def test_seconds_are_the_sum_of_the_parts() -> None:
    found = predict(plan_of(GB, GB), 1_000_000, Machines(disk=GB))
    assert found.metadata == pytest.approx(2.9)
    assert found.seconds == found.starting + found.metadata + found.planning + found.moving
