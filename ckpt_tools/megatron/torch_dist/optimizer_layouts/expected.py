"""Which states an optimizer keeps of every parameter: told by the optimizer, not by what happens to be stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.run_state.common_state import CommonState

_STATES = {"adam": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ("momentum_buffer",)}


class Expected(NamedTuple):
    """The kinds of state that every trained parameter must have, and what says so.

    `kinds` is None when nothing tells: `why` then says what is not known.
    """

    kinds: tuple[str, ...] | None
    why: str

    def missing(self, held: Iterable[str]) -> list[str]:
        """The kinds of which there is nothing."""
        have = set(held)
        return [kind for kind in self.kinds or () if kind not in have]


def expected_states(common: CommonState, groups: Sequence[Mapping[str, Any]]) -> Expected:
    """What the arguments say, else what the fields of the parameter groups prove; masters are not part of it."""
    named = common.arg("optimizer")
    fields = {field for group in groups for field in group}
    if isinstance(named, str):
        name, why = named, f"args.optimizer is {named!r}"
    elif {"betas", "eps"} <= fields:
        name, why = "adam", "its groups have betas and eps, as Adam's"
    elif "betas" in fields:
        name, why = "lion", "its groups have betas but no eps, as Lion's"
    elif "momentum" in fields:
        name, why = "sgd", "its groups have a momentum, as SGD's"
    else:
        return Expected(None, "neither the args nor the fields of the groups name the optimizer")
    if name not in _STATES:
        return Expected(None, f"{why}, and which states it keeps of which parameter is not known")
    kinds = _STATES[name]
    if name == "sgd" and (not common.arg("sgd_momentum", 1) or any(g.get("momentum") == 0 for g in groups)):
        kinds = ()  # plain SGD keeps nothing
    return Expected(kinds, why)


def refuse_missing_states(held: Iterable[str], expected: Expected) -> None:
    """Nothing, when a state of every kind is there.

    Raises:
        MappingError: a kind is missing entirely.
    """
    missing = expected.missing(held)
    if missing:
        raise MappingError(
            f"no parameter has the optimizer state {' or '.join(missing)}, but {expected.why}: they were lost. Take "
            "another iteration, or leave the optimizer out with --weights-only"
        )
