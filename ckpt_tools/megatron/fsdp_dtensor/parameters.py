"""Live parameters as rows of stored ones (`live_parameters`), and stored ones as rows of live (`stored_parameters`).

Live parameters are what the running model holds, stored ones what `torch_dist` makes of them. Most are one and the
same. Fused projections (gated delta nets, Mamba mixers, MLA's down-projections) are stored in parts, and so is a
gated fc1 in some checkpoints. The rows of gated delta nets and Mamba mixers are grouped by tensor-parallel rank: rank
0's rows of every part, then rank 1's (gated_delta_net/common.py, mamba_mixer.py `sharded_state_dict`). On the way
back the parts' sizes come from the shapes of the tensors around them and have to add up to the fused one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.errors import MappingError, UsageError, raise_if
from ckpt_tools.megatron.hybrid import is_hybrid
from ckpt_tools.megatron.keys import HALVES, split_expert, split_expert_half, split_projection
from ckpt_tools.megatron.names import (
    MLA_DOWN,
    MLA_FUSED_DOWN,
    MTP_LIVE,
    PART_ORDERS,
    Dialect,
    ModelStyle,
    fuse_local_norm,
    group_name,
    live_name,
    state_name,
    stored_name,
)
from ckpt_tools.model.catalog import Value, concat
from ckpt_tools.model.many import many
from ckpt_tools.model.model import Parameter
from ckpt_tools.model.roles import WEIGHT


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
            rows = (Rows(parameter, 0, parameter.shape[0] if parameter.shape else 1),)
            live.append(_named(name, base, dialect, parameter.shape, rows))
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


def _named(
    name: str, group: str, dialect: Dialect, shape: tuple[int, ...], rows: tuple[Rows, ...]
) -> LiveParameter:
    """A live parameter under the dialect's names."""
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


@dataclass(frozen=True, slots=True)
class FsdpTensor:
    """One parameter or buffer of the running model; `shape` is global and unsplit, in elements.

    Kinds of `values` are `WEIGHT` and the optimizer's own (exp_avg, ...). `step` is torch Adam's, which stands beside
    the states; a fused Adam keeps it in the group.
    """

    name: str
    shape: tuple[int, ...]
    values: Mapping[str, Value]
    step: float | None = None

    @property
    def states(self) -> tuple[str, ...]:
        """Kinds of optimizer state that are stored."""
        return tuple(kind for kind in self.values if kind != WEIGHT)


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """One parameter or buffer under its `torch_dist` name, layers and experts still one by one.

    `name` has the layer number but no expert number. `cuts` are the rows `(start, count)` of the live tensor that
    it is made of, in order; none when it is all of it.
    """

    name: str
    expert: int | None
    shape: tuple[int, ...]
    tensor: FsdpTensor
    cuts: tuple[tuple[int, int], ...] = ()

    def value(self, kind: str) -> Value:
        """Its part of one kind of the live tensor's values."""
        whole = self.tensor.values[kind]
        return concat(self.name, [whole.rows(*cut) for cut in self.cuts]) if self.cuts else whole


def stored_parameters(
    tensors: Sequence[FsdpTensor], tp: int | None, local_norms: bool | None
) -> list[StoredParameter]:
    """Stored parameters of the model in the order of its live tensors.

    `tp` is the tensor-parallel size of the job that wrote the tensors, None when nothing tells it; `local_norms`
    whether its norms are modules of their own where Transformer Engine fuses them, None when nobody said.
    """
    hybrid = any(f"{MTP_LIVE}layers." in tensor.name for tensor in tensors)
    if is_hybrid(tensor.name for tensor in tensors):
        local_norms = False
    named = [(tensor, *split_expert(stored_name(tensor.name, hybrid))) for tensor in tensors]
    shapes = {name: tensor.shape for tensor, name, _ in named}
    parameters: list[StoredParameter] = []
    problems: list[str] = []
    for tensor, name, expert in named:
        try:
            parts = _parts(name, shapes)
        except MappingError as error:
            problems.append(str(error))
            continue
        if parts is None:
            own_name = _norm_name(name, shapes, local_norms)
            parameters.append(StoredParameter(own_name, expert, tensor.shape, tensor))
        elif MLA_FUSED_DOWN in name:
            parameters += _split(tensor, parts, 1)
        elif tp is None:
            raise UsageError(
                f"{tensor.name}: the rows of this projection are grouped by tensor-parallel rank, and the checkpoint "
                "holds no rng states that tell how many ranks wrote it; pass --tp"
            )
        else:
            parameters += _split(tensor, parts, tp)
    problems += _clashes(parameters)
    raise_if(problems, MappingError, "the live tensors do not make a torch_dist model")
    return parameters


def _clashes(parameters: Iterable[StoredParameter]) -> Iterable[str]:
    seen: dict[tuple[str, int | None], str] = {}
    for p in parameters:
        other = seen.setdefault((p.name, p.expert), p.tensor.name)
        if other != p.tensor.name:
            yield f"{other} and {p.tensor.name} would both be written as {p.name}"


def _norm_name(name: str, shapes: Shapes, local_norms: bool | None) -> str:
    """The stored name of a norm; other names as they are.

    Only the local specs of layers with a `linear_qkv` rename their norms on the way to disk, those of a vision
    tower excepted (gpt_layer_specs.py, vit_layer_specs.py). Such a layer is known by what it holds: Transformer
    Engine would have the input norm inside `linear_qkv`.
    """
    fused = fuse_local_norm(name)
    if fused == name or local_norms is False or "vision_model." in name:
        return name
    layer = name.rpartition(".")[0].rpartition(".")[0]
    is_local = (
        f"{layer}.input_layernorm.weight" in shapes
        and f"{layer}.self_attention.linear_qkv.weight" in shapes
        and f"{layer}.self_attention.linear_qkv.layer_norm_weight" not in shapes
    )
    return fused if is_local else name


def _split(tensor: FsdpTensor, parts: Mapping[str, int], ranks: int) -> list[StoredParameter]:
    """The parts of a fused projection, whose rows are grouped by rank."""
    uneven = [part for part, rows in parts.items() if rows % ranks]
    if uneven:
        raise MappingError(
            f"{tensor.name}: the rows of {uneven} of {dict(parts)} do not divide by tensor parallel size {ranks}"
        )
    local = {part: rows // ranks for part, rows in parts.items()}
    starts, at = {}, 0
    for part, rows in local.items():
        starts[part] = at
        at += rows
    return [
        StoredParameter(
            name,
            None,
            (parts[name], *tensor.shape[1:]),
            tensor,
            tuple((rank * at + starts[name], local[name]) for rank in range(ranks)),
        )
        for name in parts
    ]


def packed_projections(names: Iterable[str]) -> tuple[str, ...]:
    """The live tensors whose rows are grouped by tensor-parallel rank, in another order for another size."""
    live = {stored_name(name): name for name in names}
    return tuple(name for stored, name in live.items() if _is_packed(stored, live))


def _is_packed(name: str, names: Collection[str]) -> bool:
    """Whether a stored spelling is an input projection or convolution of a gated delta net or a Mamba mixer.

    `.weight` and `.bias` alone: a norm fused into the projection is whole on every rank.
    """
    module, _, projection = name.rpartition(".")[0].rpartition(".")
    return (
        projection in ("in_proj", "conv1d")
        and name.endswith((".weight", ".bias"))
        and not split_projection(name)
        and f"{module}.A_log" in names
    )


def _parts(name: str, shapes: Shapes) -> dict[str, int] | None:
    """Stored names and rows of the parts of a fused projection in order; None for any other tensor."""
    if MLA_FUSED_DOWN in name and name.endswith((".weight", ".bias")):
        return _mla_parts(name, shapes)
    if not _is_packed(name, shapes):
        return None
    module, _, projection = name.rpartition(".")[0].rpartition(".")
    sizes = _mamba_sizes(module, shapes) if module.endswith("mixer") else _gdn_sizes(module, shapes)
    order = _IN_CONV[tuple(sizes)] if projection == "conv1d" else tuple(sizes)
    parts = {f"{name}.{part}": sizes[part] for part in order}
    if sum(parts.values()) != shapes[name][0]:
        raise MappingError(
            f"{name}: has {shapes[name][0]} rows, but its parts {sizes} make {sum(parts.values())}; "
            "this is not a projection that this tool knows"
        )
    return parts


_GDN, _GDN2, _GDN_CONV, _MAMBA, _MAMBA_CONV = PART_ORDERS
_IN_CONV = {_GDN: _GDN_CONV, _GDN2: _GDN_CONV, _MAMBA: _MAMBA_CONV}


def _gdn_sizes(module: str, shapes: Shapes) -> dict[str, int]:
    """Rows of the parts of a gated delta net's input projection (gated_delta_net/{gdn,gdn2}.py).

    The second kind has gates for every key and value channel where the first has them for every head, and so has
    its `dt_bias`.
    """
    heads = _rows(shapes, f"{module}.A_log")
    value = _columns(shapes, f"{module}.out_proj.weight")
    key = _half(_rows(shapes, f"{module}.conv1d.weight") - value, f"{module}.conv1d.weight")
    projection = shapes.get(f"{module}.in_proj.weight", (0,))
    if shapes.get(f"{module}.dt_bias") == (key,) and projection[0] == 4 * key + 3 * value:
        return dict(zip(_GDN2, (key, key, value, value, key, key, value), strict=True))
    return dict(zip(_GDN, (key, key, value, value, heads, heads), strict=True))


def _mamba_sizes(module: str, shapes: Shapes) -> dict[str, int]:
    """Rows of the parts of a Mamba mixer's input projection (ssm/mamba_mixer.py)."""
    inner = _columns(shapes, f"{module}.out_proj.weight")
    state = _half(_rows(shapes, f"{module}.conv1d.weight") - inner, f"{module}.conv1d.weight")
    return dict(zip(_MAMBA, (inner, inner, state, state, _rows(shapes, f"{module}.dt_bias")), strict=True))


def _mla_parts(name: str, shapes: Shapes) -> dict[str, int]:
    """Rows of the query and key-value halves of a fused MLA down projection."""
    layer, _, leaf = name.partition(MLA_FUSED_DOWN)
    query = _columns(shapes, f"{layer}.linear_q_up_proj.weight")
    rest = shapes[name][0] - query
    if rest < _columns(shapes, f"{layer}.linear_kv_up_proj.weight"):
        raise MappingError(f"{name}: {shapes[name][0]} rows are too few for {query} query rows and the keys")
    return dict(zip((f"{layer}{part}{leaf}" for part in MLA_DOWN), (query, rest), strict=True))


def _rows(shapes: Shapes, name: str) -> int:
    return _shape(shapes, name, 1)[0]


def _columns(shapes: Shapes, name: str) -> int:
    return _shape(shapes, name, 2)[1]


def _shape(shapes: Shapes, name: str, dims: int) -> tuple[int, ...]:
    shape = shapes.get(name, ())
    if len(shape) < dims:
        raise MappingError(f"{name}: needed to cut a fused projection apart, found shape {shape}")
    return shape


def _half(rows: int, name: str) -> int:
    if rows < 2 or rows % 2:
        raise MappingError(f"{name}: {rows} rows are left for two equal parts")
    return rows // 2
