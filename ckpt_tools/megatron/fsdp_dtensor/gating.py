"""Which fc1 weights hold a gate half and an up half, decided per module by shapes and by the activation.

Shapes tell whether an MLP is gated: fc1 then has twice as many rows as fc2 has columns. They do not tell the
activation, and Megatron-FSDP splits fc1 only for SwiGLU, so that has to come from the args, the run
configuration or the user (Megatron-LM checkpointing.py; Bridge training/checkpointing.py).

Modules of transformers inside a model (vision towers of Megatron-Bridge's) are in no transformer layer whose own
configuration tells, and Megatron then goes by the name alone (core 0.16.1 always does): every `mlp.linear_fc1` of a
SwiGLU model is requested as separate gate and up tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckpt_tools.errors import MappingError, raise_if
from ckpt_tools.megatron.fsdp_dtensor.parameters import LiveParameter
from ckpt_tools.megatron.keys import is_of_transformers

FC1 = re.compile(r"^(?P<module>.*)\.linear_fc1\.(?P<leaf>weight|bias)(?P<expert>\d*)$")


@dataclass(frozen=True, slots=True)
class GatingChoice:
    """What is known about the activation: None where nobody said.

    `swiglu` comes from the checkpoint, `wanted` and `modules` from `--swiglu/--no-swiglu` and
    `--swiglu-modules` (name segments, as NVIDIA's option takes them).
    """

    swiglu: bool | None
    wanted: bool | None = None
    modules: tuple[str, ...] = ()


def mark_gated(parameters: Sequence[LiveParameter], choice: GatingChoice) -> list[LiveParameter]:
    """The same parameters with `gated` set on every fc1 that is stored as two halves."""
    gated = gated_modules(parameters)
    problems = list(_contradictions(gated, choice))
    raise_if(problems, MappingError, "the gating flags do not fit the checkpoint")
    split = choice.swiglu if choice.wanted is None else choice.wanted
    if split is None and not choice.modules and any(gated.values()):
        some = next(module for module, is_gated in gated.items() if is_gated)
        raise MappingError(
            f"{some}.linear_fc1 is gated by its shape, but neither args nor run_config.yaml say by which "
            "activation; pass --swiglu if the model uses SwiGLU, --no-swiglu otherwise"
        )

    def is_stored_in_halves(name: str) -> bool:
        match = _fc1(name)
        if match is None:
            return False
        by_name = split and ".mlp.linear_fc1." in name and is_of_transformers(name)
        return bool(by_name or ((split or choice.modules) and gated.get(_module_id(match))))

    return [replace(p, gated=True) if is_stored_in_halves(p.name) else p for p in parameters]


def gated_modules(parameters: Iterable[LiveParameter]) -> dict[str, bool]:
    """For every module of Megatron's with an fc1: whether it is gated, by shapes alone.

    Keys name the module and, for grouped experts, the expert, as `module:7`.
    """
    shapes = {p.name: p.shape for p in parameters}
    gated: dict[str, bool] = {}
    problems = []
    for name, shape in shapes.items():
        match = _fc1(name)
        if not match or match["leaf"] != "weight" or is_of_transformers(name):
            continue
        other = shapes.get(f"{match['module']}.linear_fc2.weight{match['expert']}")
        if other is None:
            problems.append(f"{name} {shape} has no linear_fc2 next to it")
        elif shape[0] not in (other[1], 2 * other[1]):
            problems.append(f"{name} has {shape[0]} rows; linear_fc2 with {other[1]} columns asks for "
                            f"{other[1]} or {2 * other[1]}")  # fmt: skip
        else:
            gated[_module_id(match)] = shape[0] == 2 * other[1]
    raise_if(problems, MappingError, "linear_fc1 and linear_fc2 do not fit together")
    return gated


def _module_id(match: re.Match[str]) -> str:
    return f"{match['module']}:{match['expert']}" if match["expert"] else match["module"]


def _fc1(name: str) -> re.Match[str] | None:
    return FC1.match(name) if ".linear_fc1." in name else None  # cheap test first: few names match


def _contradictions(gated: dict[str, bool], choice: GatingChoice) -> Iterable[str]:
    if choice.wanted is not None and choice.swiglu is not None and choice.wanted != choice.swiglu:
        flag = "--swiglu" if choice.wanted else "--no-swiglu"
        yield f"{flag} was given, but the checkpoint's own settings say swiglu={choice.swiglu}"
    for module, is_gated in gated.items():
        if choice.modules:
            named = any(f".{m}." in f"{module}." or f"{module}.".startswith(f"{m}.") for m in choice.modules)
            if named != is_gated:
                yield (f"{module} is {'' if is_gated else 'not '}gated by its shape, and --swiglu-modules "
                       f"{'names' if named else 'leaves out'} it")  # fmt: skip
        elif choice.wanted and not is_gated:
            yield f"--swiglu was given, but {module} is not gated by its shape; leave the flag out"
