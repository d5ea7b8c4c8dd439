"""Live parameters as rows of stored ones (`live_parameters`), and stored ones as rows of live (`stored_parameters`).

Live parameters are what the running model holds, stored ones what `torch_dist` makes of them. Most are one and the
same. Fused projections (gated delta nets, Mamba mixers, MLA's down-projections) are stored in parts, and so is a
gated fc1 in some checkpoints. `fused_rows` says for either direction which rows of a part are which of the fused
tensor. On the way back the parts' sizes come from the shapes of the tensors around them and have to add up to the
fused one.

Which fc1 is written in two halves (`mark_gated`) is decided per module, by shapes and by the activation. Shapes tell
whether an MLP is gated: fc1 then has twice as many rows as fc2 has columns. They do not tell the activation, and
Megatron-FSDP splits fc1 only for SwiGLU, so that comes from the args, the run configuration or the user
(Megatron-LM checkpointing.py; Bridge training/checkpointing.py). Modules of transformers inside a model (vision
towers of Megatron-Bridge's) are in no transformer layer with its own configuration, and Megatron then goes by the
name alone (core 0.16.1 always does): it asks for gate and up of every `mlp.linear_fc1` of a SwiGLU model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_tools.errors import MappingError, UsageError, raise_if
from ckpt_tools.megatron.hybrid import is_hybrid
from ckpt_tools.megatron.keys import (
    HALVES,
    is_of_transformers,
    split_expert,
    split_expert_half,
    split_projection,
)
from ckpt_tools.megatron.names import (
    MLA_DOWN,
    MLA_FUSED_DOWN,
    PART_ORDERS,
    Dialect,
    ModelStyle,
    fuse_local_norm,
    group_name,
    is_hybrid_mtp,
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
    named = []
    parts: dict[str, dict[str, Parameter]] = {}
    for parameter in parameters:
        name = live_name(parameter, style)
        base, part = split_part(name, style)
        named.append((parameter, name, base, part))
        if part is not None:
            parts.setdefault(base, {})[part] = parameter
    apart = {base for base, of_base in parts.items() if _kept_apart(of_base, dialect)}
    live = []
    for parameter, name, base, part in named:
        shape: tuple[int, ...] = parameter.shape
        if part is None or base in apart:
            rows = [Rows(parameter, 0, shape[0] if shape else 1)]
        elif base in parts:  # the fused tensor takes the place of its first part
            of_base = parts.pop(base)
            order = part_order(base, of_base)
            # MLA down-projections are not split over tensor-parallel ranks, and halves of an fc1 are written apart
            ranks = 1 if order in (MLA_DOWN, HALVES) else tp
            runs = fused_rows(base, {part: of_base[part].shape[0] for part in order}, ranks)
            rows = [Rows(of_base[run.part], run.start, run.count) for run in runs]
            shape = (sum(run.count for run in runs), *shape[1:])
        else:
            continue
        own = base if len(rows) > 1 else name
        live.append(LiveParameter(state_name(own, dialect), group_name(base, dialect), shape, tuple(rows)))
    return live


class Run(NamedTuple):
    """`count` rows of a fused tensor, from `at` on, that are rows of one of its parts from `start` on."""

    part: str
    start: int
    at: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which no one needs of rows


def fused_rows(name: str, sizes: Mapping[str, int], ranks: int) -> list[Run]:
    """Where a fused tensor of parts with so many rows each, in this order, has the rows of each part.

    They are grouped by tensor-parallel rank: rank 0's rows of every part, then rank 1's (gated_delta_net/common.py,
    mamba_mixer.py `sharded_state_dict`).
    """
    if any(rows % ranks for rows in sizes.values()):
        raise MappingError(
            f"{name}: tensor parallel size {ranks} does not divide the rows of all its parts, {dict(sizes)}; choose "
            "another --tp"
        )
    runs, at = [], 0
    for rank in range(ranks):
        for part, rows in sizes.items():
            count = rows // ranks
            runs.append(Run(part, rank * count, at, count))
            at += count
    return runs


def split_part(name: str, style: ModelStyle) -> tuple[str, str | None]:
    """(`name`, None), or the name of the fused live tensor and the part of it that `name` is."""
    if part_of := split_projection(name) or split_expert_half(name):
        return part_of
    if style.fused_mla_down:
        for part in MLA_DOWN:
            if part in name:
                return name.replace(part, MLA_FUSED_DOWN), part
    return name, None


def _kept_apart(parts: Iterable[str], dialect: Dialect) -> bool:
    """Whether the dialect stores these parts on their own although the running model holds them fused."""
    names = set(parts)
    if names & set(MLA_DOWN):
        return not dialect.mla_fused_in_state
    return "query" in names and not dialect.gdn_fused_in_state  # a gated delta net's; Mamba has other names


def part_order(base: str, parts: Iterable[str]) -> tuple[str, ...]:
    """The order in which the live tensor `base` holds these parts."""
    names = set(parts)
    for order in (*PART_ORDERS, MLA_DOWN, HALVES):
        if names == set(order):
            return order
    raise MappingError(f"{base}: parts {sorted(names)} do not make a whole fused projection")


@dataclass(frozen=True, slots=True)
class FsdpTensor:
    """One parameter or buffer of the running model; `shape` is global and unsplit, in elements.

    Kinds of `values` are `WEIGHT` and the optimizer's own (exp_avg, ...). `step` is torch Adam's, which is stored
    next to the states; a fused Adam keeps it in the group.
    """

    name: str
    shape: tuple[int, ...]
    values: Mapping[str, Value]
    step: float | None = None

    @property
    def states(self) -> tuple[str, ...]:
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

    `tp` is the tensor-parallel size of the job that wrote the tensors, None if unknown; `local_norms`
    whether its norms are modules of their own where Transformer Engine fuses them, None when nobody said.
    """
    hybrid = is_hybrid_mtp(tensor.name for tensor in tensors)
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
            continue
        ranks = 1 if MLA_FUSED_DOWN in name else tp
        if ranks is None:
            raise UsageError(
                f"{tensor.name}: the rows of this projection are grouped by tensor-parallel rank, and the checkpoint "
                "holds no rng states that tell how many ranks wrote it; pass --tp"
            )
        cuts: dict[str, list[tuple[int, int]]] = {part: [] for part in parts}
        for run in fused_rows(tensor.name, parts, ranks):
            cuts[run.part].append((run.at, run.count))
        parameters += [
            StoredParameter(part, None, (rows, *tensor.shape[1:]), tensor, tuple(cuts[part]))
            for part, rows in parts.items()
        ]
    seen: dict[tuple[str, int | None], str] = {}
    for p in parameters:
        other = seen.setdefault((p.name, p.expert), p.tensor.name)
        if other != p.tensor.name:
            problems.append(f"{other} and {p.tensor.name} would both be written as {p.name}")
    raise_if(problems, MappingError, "the live tensors do not make a torch_dist model")
    return parameters


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


def packed_projections(names: Iterable[str]) -> tuple[str, ...]:
    """The live tensors with rows grouped by tensor-parallel rank; another size has another order."""
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
