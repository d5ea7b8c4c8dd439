"""A model in a checkpoint: what it says, free of the format that says it.

Every reader makes one and every writer takes one, so that a format is one of each and not a converter for every
other. Names are those of `torch_dist` with layers and experts one by one: the only spelling that depends neither on
the layer spec of the job that loads, nor on how it holds its experts, nor on its tensor-parallel size. Parts of
projections that running models fuse (gated delta nets, Mamba, MLA) are parameters of their own for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_tools.model.catalog import Value
from ckpt_tools.model.many import many
from ckpt_tools.model.roles import MASTER, WEIGHT

if TYPE_CHECKING:
    from ckpt_tools.formats.pickle.unpickle import StandIn
    from ckpt_tools.megatron.run_state.common_state import CommonState
    from ckpt_tools.megatron.run_state.record import TargetRecord
    from ckpt_tools.megatron.run_state.settings import ModelSettings
    from ckpt_tools.model.catalog import Catalog, Item


@many(frozen=True, slots=True)
class Parameter:
    """A parameter or persistent buffer of one layer and one expert; `shape` is global, in elements.

    `values` are expressions by role: `WEIGHT`, `MASTER`, and the optimizer's own (exp_avg, exp_avg_sq, ...). A format
    that stores masters in the place of weights gives no `WEIGHT`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None  # in the running model; None if unknown
    values: Mapping[str, Value]
    expert: int | None = None
    group: int | None = None  # its place in `Model.groups`, where the format says so
    origin: str = ""  # what the checkpoint calls it: a key, or the running model's tensor it is a part of

    @property
    def states(self) -> tuple[str, ...]:
        """Roles that an optimizer gave it, its master among them; none for buffers and frozen weights."""
        return tuple([role for role in self.values if role != WEIGHT])

    @property
    def weight(self) -> Value:
        """The weight, or the master where a format keeps that in its place: rounded, it is the weight."""
        return self.values[WEIGHT] if WEIGHT in self.values else self.values[MASTER]

    @property
    def main(self) -> Value:
        """The most exact value there is: the master, else the weight."""
        return self.values[MASTER] if MASTER in self.values else self.values[WEIGHT]


@dataclass(frozen=True, slots=True)
class Model:
    """Everything that a checkpoint says of a training run. Its values name tensors of `catalog`."""

    catalog: Catalog
    parameters: tuple[Parameter, ...]
    common: CommonState
    settings: ModelSettings
    optimizer_layout: str | None = None  # None: no optimizer was saved, or it was not asked for
    groups: tuple[Mapping[str, Any], ...] = ()  # of the optimizer's parameters, in id order
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    rng: Mapping[tuple[int, int], object] = field(default_factory=dict)  # (pp, tp) -> list of rng states
    grad_scaler: Mapping[str, Any] = field(default_factory=dict)  # of an fp16 run
    step: object = None  # of the optimizer, where it is kept outside the groups
    own_optimizer: Any = None  # another than Adam: its entry in the common state of `torch_dist`
    extra_states: Mapping[str, Item] = field(default_factory=dict)  # Transformer Engine's that hold something
    dropped: tuple[str, ...] = ()  # one line for each key that is left out, with the reason
    incomplete: tuple[tuple[str, str], ...] = ()  # (object, what is wrong with its shards)
    unread: str | None = None  # why masters that were wanted are not here
    notes: tuple[str, ...] = ()  # what reading found that its reader's user should know
    record: TargetRecord | None = None  # of the job that the checkpoint was converted for

    @property
    def roles(self) -> tuple[str, ...]:
        """Optimizer roles that some parameter has, in order of first appearance."""
        held = dict.fromkeys([p.states for p in self.parameters])  # a few, of any number of parameters
        return tuple(dict.fromkeys(role for states in held for role in states))

    @property
    def args_object(self) -> StandIn | None:
        """The writer's argparse namespace, to be written back as it was."""
        return self.common.values.get("args")


def unread_note(model: Model) -> list[str]:
    return [f"the stored weights are written, not the masters: {model.unread}"] if model.unread else []


def without_optimizer(model: Model, note: str) -> Model:
    """The weights alone, with a note why."""
    parameters = tuple(replace(p, values={WEIGHT: p.weight}) for p in model.parameters)
    return replace(
        model,
        parameters=parameters,
        optimizer_layout=None,
        groups=(),
        own_optimizer=None,
        notes=(*model.notes, note),
    )
