"""Which fc1 weights are written in halves: shapes, args and flags must agree."""

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.fsdp_dtensor.gating import GatingChoice, mark_gated
from ckpt_tools.megatron.fsdp_dtensor.parameters import LiveParameter

TOWERS = {
    "language.decoder.layers.0.mlp.linear_fc1.weight": (16, 4),
    "language.decoder.layers.0.mlp.linear_fc1.bias": (16,),
    "language.decoder.layers.0.mlp.linear_fc2.weight": (4, 8),
    "vision.decoder.layers.0.mlp.linear_fc1.weight": (8, 4),
    "vision.decoder.layers.0.mlp.linear_fc2.weight": (4, 8),
}


def parameters(shapes):
    return [LiveParameter(name, name, shape, ()) for name, shape in shapes.items()]


def gated(shapes, choice):
    return {p.name for p in mark_gated(parameters(shapes), choice) if p.gated}


def test_towers_are_decided_one_by_one():
    assert gated(TOWERS, GatingChoice(swiglu=True)) == {
        "language.decoder.layers.0.mlp.linear_fc1.weight",
        "language.decoder.layers.0.mlp.linear_fc1.bias",
    }


def test_a_gate_with_another_activation_stays_whole():
    assert gated(TOWERS, GatingChoice(swiglu=False)) == set()


def test_grouped_experts_are_matched_by_number():
    shapes = {f"mlp.experts.linear_fc1.weight{e}": (16, 4) for e in (0, 11)}
    shapes |= {f"mlp.experts.linear_fc2.weight{e}": (4, 8) for e in (0, 11)}
    assert gated(shapes, GatingChoice(swiglu=True)) == {f"mlp.experts.linear_fc1.weight{e}" for e in (0, 11)}


def test_modules_named_by_the_user_must_be_the_gated_ones():
    assert len(gated(TOWERS, GatingChoice(None, modules=("language",)))) == 2
    with pytest.raises(MappingError, match=r"vision\.decoder\.layers\.0\.mlp is not gated"):
        gated(TOWERS, GatingChoice(True, modules=("language", "vision")))
    with pytest.raises(MappingError, match=r"language\.decoder\.layers\.0\.mlp is gated .* leaves out"):
        gated(TOWERS, GatingChoice(True, modules=("audio",)))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (GatingChoice(None), "neither args nor run_config.yaml"),
        (GatingChoice(True, wanted=False), "--no-swiglu was given, but the checkpoint's own settings say"),
        (GatingChoice(False, wanted=True), "--swiglu was given, but the checkpoint's own settings say"),
        (GatingChoice(True, wanted=True), "vision.decoder.layers.0.mlp is not gated by its shape"),
    ],
)
def test_nothing_is_guessed(choice, message):
    with pytest.raises(MappingError, match=message):
        gated(TOWERS, choice)


def test_fc1_and_fc2_that_do_not_fit_are_refused():
    shapes = {"mlp.linear_fc1.weight": (15, 4), "mlp.linear_fc2.weight": (4, 8)}
    with pytest.raises(MappingError, match="15 rows; linear_fc2 with 8 columns asks for 8 or 16"):
        gated(shapes, GatingChoice(True))
