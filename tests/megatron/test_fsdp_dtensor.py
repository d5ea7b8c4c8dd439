"""Fields that older writers did not know, rng states that the source lacks, weights that a job holds in FP8."""

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.fsdp_dtensor.tensors import backfill_groups, rng_items
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.settings import is_held_in_fp8

SCHEDULER = {"max_lr": 0.3, "min_lr": 0.007}
WHOLE = {"wd_mult": 2.0, "lr_mult": 3.0, "is_expert_parallel": True, "is_decoupled_lr": True, "max_lr": 1.0,
         "min_lr": 0.5, "step": 7, "bias_correction": False, "default_config": False}  # fmt: skip
FILLED = {"wd_mult": 0.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "max_lr": 0.3,
          "min_lr": 0.007, "step": 5, "bias_correction": True, "default_config": True}  # fmt: skip
TORCH_ADAM = {"amsgrad": False, "foreach": None}


@pytest.mark.parametrize(
    ("group", "scheduler", "step", "expected"),
    [
        (WHOLE, SCHEDULER, 9, WHOLE),
        ({"wd_mult": 0.0, "step": 5}, SCHEDULER, None, FILLED),
        ({"wd_mult": 0.0}, SCHEDULER, 5, FILLED),
        ({"pre_wd_mult": 0.0, "pre_lr_mult": 4.0, "step": 1}, SCHEDULER, 5,  # their first names
         FILLED | {"pre_wd_mult": 0.0, "pre_lr_mult": 4.0, "lr_mult": 4.0, "step": 1}),
        ({"wd_mult": 0.0, "step": 5}, {}, None, {k: v for k, v in FILLED.items() if k not in SCHEDULER}),
        (TORCH_ADAM, SCHEDULER, 5,
         {k: v for k, v in FILLED.items() if k != "bias_correction"} | TORCH_ADAM | {"wd_mult": 1.0}),
    ],
)  # fmt: skip
def test_fields_are_filled_in_and_named(group, scheduler, step, expected):
    (filled,), notes = backfill_groups([group], scheduler, step)
    assert filled == expected
    new = [name for name in expected if name not in group and f"pre_{name}" not in group]
    assert sorted(notes) == sorted(f"group field {name} = {expected[name]!r} (groups 0)" for name in new)


@pytest.mark.parametrize(("field", "value"), [("max_lr", 0.4), ("min_lr", 0.3), ("is_decoupled_lr", True)])
def test_a_group_with_rates_of_its_own_has_no_default_config(field, value):
    groups, notes = backfill_groups([{"step": 1}, {"step": 1, field: value}], SCHEDULER, None)
    assert [group["default_config"] for group in groups] == [True, False]
    assert "group field default_config = False (groups 1)" in notes


def test_a_group_without_a_step_is_refused():
    with pytest.raises(MappingError, match="group 0 has no step"):
        backfill_groups([TORCH_ADAM], {}, None)


RNG = {(pp, tp): [{"a": f"{pp}{tp}"}] for pp in (0, 1) for tp in (0, 1, 2)}


@pytest.mark.parametrize(
    ("tp", "dropped", "copied"),
    [(5, [(1, 0), (1, 1), (1, 2)], [3, 4]), (2, [(0, 2), (1, 0), (1, 1), (1, 2)], [])],
)
def test_rng_states_of_the_first_stage_for_every_rank(tp, dropped, copied):
    _, objects, notes = rng_items(RNG, tp)
    assert {o.key: o.value for o in objects} == {
        f"rng_state.(0, {t}).0.a": f"0{min(t, 2)}" for t in range(tp)
    }
    assert notes == [
        *(f"rng of tensor-parallel rank {t}: copied from rank 2" for t in copied),
        f"rng of (pp, tp) ranks {dropped}: dropped, the target has no such ranks",
    ]


FP8 = {"fp8": "hybrid", "fp8_param_gather": True, "transformer_impl": "transformer_engine", "num_layers": 4}
LAYER = "decoder.layers.0."
IN_FP8 = [*(f"{LAYER}{name}.weight" for name in ("self_attention.linear_qkv", "self_attention.in_proj",
                                                "mlp.shared_experts.linear_fc2")),
          f"{LAYER}mlp.experts.linear_fc1.weight17", "mtp.layers.0.eh_proj.weight"]  # fmt: skip
NOT = [*(f"{LAYER}{name}" for name in ("self_attention.linear_qkv.layer_norm_weight",
                                       "self_attention.linear_qkv.bias", "mlp.router.weight",
                                       "self_attention.conv1d.weight")),
       "embedding.word_embeddings.weight", "output_layer.weight"]  # fmt: skip


@pytest.mark.parametrize("name", [*IN_FP8, *NOT])
@pytest.mark.parametrize(
    "change", [{}, {"fp8": None}, {"fp8_param_gather": False}, {"transformer_impl": "local"}]
)
def test_linear_layers_of_transformer_engine(name, change):
    assert is_held_in_fp8(name, CommonState({}, "common.pt", FP8 | change)) is (name in IN_FP8 and not change)


@pytest.mark.parametrize(
    ("more", "expected"),
    [({}, [1, 2]), ({"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 3}, [0])],
)
def test_layers_that_stay_in_bf16(more, expected):
    common = CommonState({}, "common.pt", FP8 | {"first_last_layers_bf16": True} | more)
    held = [i for i in range(4) if is_held_in_fp8(f"decoder.layers.{i}.mlp.linear_fc2.weight", common)]
    assert held == expected
