"""Ranks and coordinates, and every combination that is refused with its reason."""

import itertools

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.sharding.parameters import Parameter, Part, check_parameters
from ckpt_tools.sharding.topology import STRATEGIES, Coordinates, Topology


def test_coordinates_and_ranks_are_inverse():
    t = Topology(dp_shard=6, dp_outer=2, tp=2, cp=2, ep=4, etp=3)
    assert (t.world_size, t.shard_size, t.expert_shard_size) == (48, 12, 2)
    for expert in (False, True):
        at = [t.coordinates(rank, expert) for rank in range(48)]
        assert [t.rank(c, expert) for c in at] == list(range(48))
        assert len(set(at)) == 48
    assert t.coordinates(1) == Coordinates(0, 0, 0, 1)  # tensor parallelism is fastest
    assert t.coordinates(3, expert=True) == Coordinates(0, 0, 1, 0)
    assert t.coordinates(24) == Coordinates(1, 0, 0, 0)  # the outer axis is slowest
    for rank in (-1, 48):
        with pytest.raises(UsageError, match=f"rank {rank} does not exist.* 48 ranks"):
            t.coordinates(rank)


def test_strategies_have_names_and_numbers():
    for number, name in enumerate(STRATEGIES):
        assert Topology(strategy=number) == Topology(strategy=name) == Topology(strategy=str(number))
    assert Topology(outer_strategy=1) == Topology(outer_strategy="optim")
    assert Topology(outer_strategy=0).shards_outer is False


def test_expert_tensor_parallelism_follows_tensor_parallelism():
    assert Topology(2, tp=2).etp == 2
    assert Topology(2, tp=2, etp=1).expert_shard_size == 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"strategy": "zero3"}, "strategy 'zero3' is not one of no_shard"),
        ({"strategy": 4}, "strategy 4 is not one of"),
        ({"strategy": -1}, "strategy -1 is not one of"),
        ({"outer_strategy": 2}, r"outer_strategy 2 is not one of no_shard \(0\), optim \(1\)$"),
        ({"outer_strategy": "optim_grads"}, "outer_strategy 'optim_grads' is not one of"),
        ({"outer_strategy": "optim", "strategy": 2}, "must be optim_grads_params, not optim_grads"),
        ({"outer_strategy": "optim", "strategy": 0}, "must be optim_grads_params, not no_shard"),
        ({"pp": 2}, "pp is 2: Megatron-FSDP does not run with pipeline parallelism"),
        ({"dp_shard": 0}, "dp_shard is 0, it must be at least 1"),
        ({"tp": -2}, "tp is -2"),
        ({"dp_shard": 3, "ep": 2}, "ep 2 x etp 1 = 2 does not divide dp_shard 3 x cp 1 x tp 1 = 3"),
        ({"dp_shard": 2, "tp": 2, "ep": 2, "etp": 3}, "ep 2 x etp 3 = 6 does not divide"),
    ],
)
def test_impossible_topologies_are_refused_with_the_reason(arguments, reason):
    with pytest.raises(UsageError, match=reason):
        Topology(**arguments)


def test_all_problems_are_told_at_once():
    with pytest.raises(UsageError) as error:
        Topology(dp_shard=0, cp=0, pp=3, strategy="x")
    assert str(error.value).count("\n") == 4


def test_the_world_size_decides_what_is_left_over():
    assert Topology.of_world(64, tp=2, cp=2, dp_outer=4) == Topology(4, 4, 2, 2)
    assert Topology.of_world(64, dp_shard=32, tp=2) == Topology(32, tp=2)


@pytest.mark.parametrize(
    ("world", "sizes", "reason"),
    [
        (64, {"tp": 3}, "world size 64 is not a multiple of dp_outer 1 x cp 1 x tp 3 = 3"),
        (64, {"dp_shard": 16, "tp": 2}, "world size 64 is not dp_outer 1 x cp 1 x tp 2 x dp_shard 16 = 32"),
        (0, {"dp_shard": 0}, "dp_shard is 0, it must be at least 1"),
        (2, {"tp": 4}, "world size 2 is not a multiple of"),
        (4, {"pp": 2}, "pp is 2"),
        (4, {"tp": 0}, "tp is 0"),
    ],
)
def test_a_world_that_the_sizes_do_not_fill_is_refused(world, sizes, reason):
    with pytest.raises(UsageError, match=reason):
        Topology.of_world(world, **sizes)


def test_layouts_refuse_axes_they_do_not_have():
    for layout, topology in itertools.product(
        ("mfsdp-v1", "even"), (Topology(2, 2, 2, 2), Topology(2, strategy=0))
    ):
        topology.check_layout(layout)
    Topology(4, 2, outer_strategy=1).check_layout("mfsdp-v2")
    with pytest.raises(UsageError) as error:
        Topology(4, tp=2, cp=2).check_layout("mfsdp-v2")
    assert [f"no {axis} axis" in str(error.value) for axis in ("tp", "cp", "etp")] == [True] * 3
    with pytest.raises(UsageError, match="fsdp2 shards parameters always; strategy optim needs mfsdp-v1"):
        Topology(4, strategy=1).check_layout("fsdp2")
    with pytest.raises(UsageError, match="fsdp2 replicates over the outer axis"):
        Topology(4, outer_strategy=1).check_layout("fsdp2")
    with pytest.raises(UsageError, match="layout 'zero' is not one of mfsdp-v1, mfsdp-v2, fsdp2, even"):
        Topology().check_layout("zero")


def test_a_tensor_that_is_listed_twice_is_refused():
    """Also as a part: two tensors of one name would be written over each other."""
    twice = [Parameter("w", (4, 2), "float32"), Parameter("w", (4, 2), "float32")]
    parts = (Part("v_w", 2), Part("v_v", 2))
    part = [Parameter("v", (4, 2), "float32", parts=parts), Parameter("v_v", (2, 2), "float32")]
    for parameters, name in ((twice, "w"), (part, "v_v")):
        with pytest.raises(UsageError, match=f"cannot be placed:\n.*{name} is listed 2 times"):
            check_parameters(parameters, Topology(2), scalars=False)
    check_parameters([twice[0], part[0]], Topology(2), scalars=False)
