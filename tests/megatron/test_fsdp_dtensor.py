"""Fields that older writers did not know, and rng states of ranks that the source does not have."""

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.fsdp_dtensor.tensors import backfill_groups, rng_items

SCHEDULER = {"max_lr": 0.3, "min_lr": 0.007}
ADAMW = {"amsgrad": False, "foreach": None}


def test_learning_rates_come_from_the_schedulers_fields_of_the_same_name():
    (filled,), notes = backfill_groups([{"wd_mult": 0.0, "step": 5}], SCHEDULER, None)
    assert filled == {
        "wd_mult": 0.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "max_lr": 0.3,
        "min_lr": 0.007,
        "step": 5,
        "bias_correction": True,
        "default_config": True,
    }
    assert "group field max_lr = 0.3 (groups 0)" in notes
    assert "group field min_lr = 0.007 (groups 0)" in notes


def test_what_a_group_has_is_kept():
    own = {
        "max_lr": 1.0,
        "min_lr": 0.5,
        "wd_mult": 2.0,
        "lr_mult": 3.0,
        "is_expert_parallel": True,
        "step": 7,
    }
    own |= {"is_decoupled_lr": True, "bias_correction": False, "default_config": False}
    (filled,), notes = backfill_groups([own], SCHEDULER, 9)
    assert filled == own
    assert notes == []


def test_the_first_names_of_the_multipliers_count():
    (filled,), _ = backfill_groups([{"pre_wd_mult": 0.25, "pre_lr_mult": 4.0, "step": 1}], {}, None)
    assert (filled["wd_mult"], filled["lr_mult"]) == (0.25, 4.0)
    assert not filled.keys() & {"max_lr", "min_lr"}  # nothing tells them


@pytest.mark.parametrize(("field", "value"), [("max_lr", 0.4), ("min_lr", 0.3), ("is_decoupled_lr", True)])
def test_a_group_with_rates_of_its_own_has_no_default_config(field, value):
    groups = [{"step": 1}, {"step": 1, field: value}]
    found, notes = backfill_groups(groups, SCHEDULER, None)
    assert [group["default_config"] for group in found] == [True, False]
    assert "group field default_config = False (groups 1)" in notes


def test_steps_outside_the_groups_and_torch_adam():
    (filled,), _ = backfill_groups([ADAMW], {}, 11)
    assert filled["step"] == 11
    assert "bias_correction" not in filled
    with pytest.raises(MappingError, match="group 0 has no step"):
        backfill_groups([ADAMW], {}, None)


def states(rng, tp):
    _, objects, notes = rng_items(rng, tp)
    return {o.key: o.value for o in objects}, notes


RNG = {(pp, tp): [{"a": f"{pp}{tp}"}] for pp in (0, 1) for tp in (0, 1, 2)}


def test_extra_ranks_get_the_states_of_the_last_rank_of_the_first_stage():
    found, notes = states(RNG, 5)
    assert found == {f"rng_state.(0, {t}).0.a": f"0{min(t, 2)}" for t in range(5)}
    assert notes == [
        "rng of tensor-parallel rank 3: copied from rank 2",
        "rng of tensor-parallel rank 4: copied from rank 2",
        "rng of (pp, tp) ranks [(1, 0), (1, 1), (1, 2)]: dropped, the target has no such ranks",
    ]


def test_fewer_ranks_keep_their_own_states():
    found, notes = states(RNG, 2)
    assert found == {f"rng_state.(0, {t}).0.a": f"0{t}" for t in range(2)}
    assert "(0, 2)" in notes[0]
