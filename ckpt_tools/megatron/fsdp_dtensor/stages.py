"""Layers of pipeline stages that were saved under the numbers they have inside of their stage (MLM#7452).

Megatron-FSDP names weights by `named_parameters()`, which counts the layers of each pipeline stage from 0, and the
states of its optimizer by the layer's number in the whole model (fsdp_dtensor_checkpoint.py
`get_global_unique_param_name`). Stages that save into one checkpoint so overwrite each other's weights: DCP keeps one
of the writers of a key. Only where no two stages meet under a name do the states tell where the weights belong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_tools.megatron.keys import decoder_layer
from ckpt_tools.megatron.run_state.common_state import CommonState

ISSUE = "MLM#7452"


@dataclass(frozen=True, slots=True)
class LocalNumbers:
    """What tells that weights have the layer numbers of a pipeline stage."""

    weights: tuple[int, ...]  # numbers of the decoder's layers, in order
    states: tuple[int, ...]  # the same of optimizer states and groups, which have the model's numbers
    layers: int | None  # of the whole model, as the args say
    stages: int

    @property
    def offset(self) -> int | None:
        """What is to be added to the weights' numbers; None where several stages stood under one number."""
        if not self.states or len(self.states) != len(self.weights):
            return None
        shift = self.states[0] - self.weights[0]
        return shift if [n + shift for n in self.weights] == list(self.states) else None

    def __str__(self) -> str:
        held = f", the optimizer's states layers {ranges(self.states)}" if self.states else ""
        told = "" if self.layers is None else f", the args say {self.layers} layers"
        met = "" if self.offset is not None else ", one over the other: those of other stages are lost"
        met = met if self.states else ", and no optimizer states tell of which stage they are"
        return (
            f"{ISSUE}: the weights are of layers {ranges(self.weights)}{held}{told} and {self.stages} pipeline "
            f"stages: the weights were saved under the numbers that layers have inside of their stage{met}"
        )

    @property
    def way_out(self) -> str:
        """What to do about it."""
        if self.offset is not None:
            return "`repair` gives the layers of this stage their numbers in the model"
        again = "save the run again as torch_dist, or from a job without pipeline parallelism"
        if not self.states:
            return again
        return f"{again}, or take a checkpoint from before; of this one only the optimizer's states are whole"


def local_numbers(
    weights: Iterable[str], states: Iterable[str], common: CommonState, stages: int = 1
) -> LocalNumbers | None:
    """What is wrong with the layer numbers of an `fsdp_dtensor` checkpoint; None for a sound or another damaged one.

    Args:
        weights: names of the parameters under `model.*`.
        states: those of optimizer states and group fields.
        stages: pipeline stages whose rng states are stored.
    """
    held, named = _layers(weights), _layers(states)
    count = common.arg("num_layers")
    layers = count if isinstance(count, int) else None
    told = common.arg("pipeline_model_parallel_size")
    stages = max(stages, told if isinstance(told, int) else 1)
    if not held or stages < 2 or held != tuple(range(len(held))):
        return None
    is_short = bool(set(named) - set(held)) if named else layers is not None and len(held) < layers
    return LocalNumbers(held, named, layers, stages) if is_short else None


def _layers(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({layer[0] for layer in map(decoder_layer, names) if layer}))


def ranges(numbers: Iterable[int]) -> str:
    """`0, 1, 2, 5` as `0-2, 5`."""
    out: list[list[int]] = []
    for n in sorted(numbers):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in out)
