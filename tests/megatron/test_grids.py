"""Whose rng states a loading job asks for, and what it gets where the source has none."""

from typing import Any

import pytest

from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.formats.pickle.unpickle import stand_in
from ckpt_tools.megatron.names import DIALECTS
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.record import Size
from ckpt_tools.megatron.torch_dist.grids import RngGrid, incomplete_objects, rng_grid, rng_objects

MAIN, CORE_016, BRIDGE = (DIALECTS[name] for name in ("main", "core-0.16", "bridge"))
BOTH = {(0, 0): [{"a": 0}], (0, 1): [{"a": 1}]}


def common(**args):
    namespace = stand_in("argparse", "Namespace")()
    namespace.state = args
    return CommonState({"args": namespace}, "items")


def sizes(tp=1, pp=1, ep=1, world=None):
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    return common(**dict(zip(names, (tp, pp, ep), strict=True)), world_size=world)


@pytest.mark.parametrize(
    ("args", "dialect", "given", "expected"),
    [
        (common(), MAIN, {}, RngGrid(1, 2)),
        (sizes(tp=1, pp=2), MAIN, {}, RngGrid(2, 1)),
        (sizes(ep=2, world=8), MAIN, {}, RngGrid(1, 1)),
        (sizes(ep=1, world=8), CORE_016, {}, RngGrid(1, 1)),
        (sizes(ep=2, tp=2, world=8), CORE_016, {}, RngGrid(1, 2, Size(4, "args"))),
        (sizes(ep=2, pp=4, world=8), BRIDGE, {}, RngGrid(4, 1, Size(2, "args"))),
        (sizes(ep=1, world=8), CORE_016, {"ep": 4}, RngGrid(1, 1, Size(8, "args"))),
        (sizes(ep=2, tp=2, world=8), CORE_016, {"gpus": 6}, RngGrid(1, 2, Size(3, "--gpus"))),
        (sizes(ep=2, world=8), CORE_016, {"ep": 1}, RngGrid(1, 1)),
    ],
)
def test_the_grid_is_that_of_the_args(args, dialect, given, expected):
    assert rng_grid(BOTH, args, dialect, **given) == expected


@pytest.mark.parametrize(
    ("args", "gpus", "message"),
    [
        (sizes(ep=2), None, "their number is unknown: give --gpus"),
        (sizes(ep=2, tp=2), 3, "3 GPUs are not a multiple of TP x PP"),
        (sizes(ep=2, tp=2), 0, "0 GPUs are not a multiple"),
    ],
)
def test_data_parallel_ranks_that_nobody_counted(args, gpus, message):
    with pytest.raises(UsageError, match=message):
        rng_grid(BOTH, args, CORE_016, gpus=gpus)


@pytest.mark.parametrize(
    ("rng", "grid", "expected", "notes"),
    [
        (BOTH, RngGrid(2, 3), {f"{p}.{t}_2.3": min(t, 1) for p in (0, 1) for t in (0, 1, 2)},
         ["rng of (pp, tp) rank (0, 2): copied from rank (0, 1)",
          *(f"rng of (pp, tp) rank (1, {t}): copied from rank (0, {min(t, 1)})" for t in range(3))]),
        ({**BOTH, (1, 0): [{"a": 7}]}, RngGrid(2, 2), {"0.0_2.2": 0, "0.1_2.2": 1, "1.0_2.2": 7, "1.1_2.2": 7},
         ["rng of (pp, tp) rank (1, 1): copied from rank (1, 0)"]),
        (BOTH, RngGrid(1, 2, Size(3, "args")), {f"0.{t}.{d}_1.2.3": t for t in (0, 1) for d in (0, 1, 2)},
         ["rng of data-parallel ranks: all have rank 0's, the source keeps no others"]),
        (BOTH, RngGrid(1, 1), {"0.0_1.1": 0},
         ["rng of (pp, tp) ranks [(0, 1)]: dropped, the args name no such ranks"]),
    ],
)  # fmt: skip
def test_every_rank_of_the_grid_has_its_own_states_or_those_of_the_nearest(rng, grid, expected, notes):
    objects, found = rng_objects(rng, grid)
    values: dict[str, Any] = {o.key.removeprefix("rng_state/shard_"): o.value for o in objects}
    assert {place: value[0][0]["a"] for place, value in values.items()} == expected
    assert found == notes


def test_an_empty_tracker_is_given_back():
    (state,) = [o.value for o in rng_objects({(0, 0): [{"random_rng_state": 1}]}, RngGrid(1, 1))[0]]
    assert state == [[{"random_rng_state": 1, "rng_tracker_states": {}}]]


def test_what_are_no_states():
    assert rng_objects({}, None) == ([], ["the source has no rng states: resume with --no-load-rng"])
    with pytest.raises(MappingError, match=r"rng_state.\(0, 0\): expected a list of states, found dict"):
        rng_objects({(0, 0): {}}, RngGrid(1, 1))


@pytest.mark.parametrize("drops", [True, False])
def test_extra_states_that_hold_nothing_may_be_left_out_by_the_job(drops):
    keys = ["a._extra_state/shard_1_4", "rng_state/shard_0.0_1.2"]
    found = incomplete_objects(keys, common(ckpt_drop_redundant_extra_state=drops))
    assert [name for name, _ in found] == ["rng_state"] if drops else ["a._extra_state", "rng_state"]
