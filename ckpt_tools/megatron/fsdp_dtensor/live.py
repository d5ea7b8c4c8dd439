"""Live parameters: what the running model holds, each a concatenation of stored parameters along dimension 0.

Most are one stored parameter. Fused projections are several: gated delta nets, Mamba mixers and fused MLA are
stored in parts, and so is a gated fc1 in some checkpoints. Inside a fused projection the rows are grouped by
tensor-parallel rank: rank 0's rows of every part, then rank 1's (gated_delta_net/common.py, mamba_mixer.py
`sharded_state_dict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.keys import HALVES, split_expert_half, split_projection
from ckpt_tools.megatron.names import (
    MLA_DOWN,
    MLA_FUSED_DOWN,
    PART_ORDERS,
    Dialect,
    ModelStyle,
    depends_on_dialect,
    group_name,
    live_name,
    state_name,
)
from ckpt_tools.model.many import many
from ckpt_tools.model.model import Parameter


class Rows(NamedTuple):
    """Rows `[start, start + count)` of a stored parameter; the live one has them behind the rows before."""

    parameter: Parameter
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which no one needs of rows


@many(frozen=True, slots=True)
class LiveParameter:
    """One parameter or buffer of the running model; `shape` is global and unsplit, in elements."""

    name: str  # in model.* and optimizer.state.*
    group_name: str  # in optimizer.param_to_group_meta.* and in param_to_param_group_map files
    shape: tuple[int, ...]
    rows: tuple[Rows, ...]
    gated: bool = False  # written as two halves `_w` and `_v`

    @property
    def is_packed(self) -> bool:
        """Whether its rows are grouped by tensor-parallel rank, so that no job of another size can use it."""
        return len(self.rows) > 1 and split_projection(self.rows[0].parameter.name) is not None

    @property
    def stored(self) -> tuple[Parameter, ...]:
        """The stored parameters it is made of, each once, in order of first use."""
        if len(self.rows) == 1:
            return (self.rows[0].parameter,)
        return tuple({(r.parameter.name, r.parameter.expert): r.parameter for r in self.rows}.values())


def live_parameters(
    parameters: Sequence[Parameter], style: ModelStyle, dialect: Dialect, tp: int
) -> list[LiveParameter]:
    """Live parameters of the model in stored order; `tp` is the target's tensor-parallel size."""
    names = [live_name(parameter, style) for parameter in parameters]
    named = [
        (parameter, name, *split_part(name, style)) for parameter, name in zip(parameters, names, strict=True)
    ]
    parts: dict[str, dict[str, Parameter]] = {}
    for parameter, _, base, part in named:
        if part is not None:
            parts.setdefault(base, {})[part] = parameter
    fused = {base: found for base, found in parts.items() if not _kept_apart(found, dialect)}
    live = []
    for parameter, name, base, part in named:
        if part is None or (base in parts and base not in fused):
            live.append(_single(parameter, name, base, dialect))
        elif base in parts:  # the fused tensor stands where its first part stood
            live.append(_fused(base, parts.pop(base), dialect, tp))
    return live


def split_part(name: str, style: ModelStyle) -> tuple[str, str | None]:
    """(`name`, None), or the name of the fused live tensor and the part of it that `name` is."""
    if found := split_projection(name) or split_expert_half(name):
        return found
    if style.fused_mla_down:
        for part in MLA_DOWN:
            if part in name:
                return name.replace(part, MLA_FUSED_DOWN), part
    return name, None


def _kept_apart(parts: Iterable[str], dialect: Dialect) -> bool:
    """Whether the dialect stores these parts on their own although the running model holds them fused."""
    found = set(parts)
    if found & set(MLA_DOWN):
        return not dialect.mla_fused_in_state
    return "query" in found and not dialect.gdn_fused_in_state  # a gated delta net's; Mamba has other names


def _single(parameter: Parameter, name: str, group: str, dialect: Dialect) -> LiveParameter:
    count = parameter.shape[0] if parameter.shape else 1
    return _named(name, group, dialect, parameter.shape, (Rows(parameter, 0, count),))


def _named(
    name: str, group: str, dialect: Dialect, shape: tuple[int, ...], rows: tuple[Rows, ...]
) -> LiveParameter:
    """A live parameter under the dialect's names."""
    if not (depends_on_dialect(name) or depends_on_dialect(group)):
        return LiveParameter(name, group, shape, rows)
    return LiveParameter(state_name(name, dialect), group_name(group, dialect), shape, rows)


def _fused(base: str, parts: dict[str, Parameter], dialect: Dialect, tp: int) -> LiveParameter:
    order = part_order(base, parts)
    # MLA down-projections are not split over tensor-parallel ranks, and halves of an fc1 are written apart again
    ranks = 1 if order in (MLA_DOWN, HALVES) else tp
    rows, whole = [], 0
    for rank in range(ranks):
        for part in order:
            parameter = parts[part]
            count, rest = divmod(parameter.shape[0], ranks)
            if rest:
                raise MappingError(
                    f"{base}: part {part!r} has {parameter.shape[0]} rows, which tensor parallel size {tp} does "
                    "not divide; choose another --tp"
                )
            rows.append(Rows(parameter, rank * count, count))
            whole += count
    shape = (whole, *next(iter(parts.values())).shape[1:])
    return _named(base, base, dialect, shape, tuple(rows))


def part_order(base: str, parts: Iterable[str]) -> tuple[str, ...]:
    """The order in which the live tensor `base` holds these parts."""
    found = set(parts)
    for order in (*PART_ORDERS, MLA_DOWN, HALVES):
        if found == set(order):
            return order
    raise MappingError(f"{base}: parts {sorted(found)} do not make a whole fused projection")
