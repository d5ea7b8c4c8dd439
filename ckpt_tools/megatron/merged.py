"""A model with low-rank adapters merged into its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.errors import MappingError, raise_if
from ckpt_tools.megatron.adapters import Adapter
from ckpt_tools.megatron.huggingface.config.megatron_args import read_model_args
from ckpt_tools.model.catalog import Made, TensorEntry, Value, concat, made_entry
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.kernels.low_rank import AddLowRank
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import WEIGHT


class Rows(NamedTuple):
    """`size` rows from `start` of a weight."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


def merged_model(model: Model, adapters: Sequence[Adapter], alpha: float) -> Model:
    """The weights of `model` with every adapter's part added, and nothing of its optimizer.

    Where fp32 masters are there, a part is added to the master, rounded to float32, and the weight is the rounding of
    that, as in every checkpoint that a job writes; else it is added to the weight and rounded once.
    """
    of: dict[str, list[Adapter]] = {}
    for adapter in adapters:
        of.setdefault(adapter.base, []).append(adapter)
    names = {p.name for p in model.parameters}
    problems = [f"{a.label}: the base has no such weight" for a in adapters if a.base not in names]
    made: dict[str, TensorEntry] = {}
    parameters = []
    for parameter in model.parameters:
        its = [a for a in of.get(parameter.name, ()) if a.expert in (None, parameter.expert)]
        weight = parameter.weight
        try:
            weight = _merged(parameter, its, alpha, made, model) if its else weight
        except (MappingError, ValueError) as error:
            problems.append(f"{parameter.name}: {error}")
        parameters.append(replace(parameter, values={WEIGHT: weight}))
    raise_if(problems, MappingError, "the adapter does not fit the base")
    catalog = replace(model.catalog, tensors={**model.catalog.tensors, **made})
    return replace(
        model,
        catalog=catalog,
        parameters=tuple(parameters),
        optimizer_layout=None,
        groups=(),
        own_optimizer=None,
    )


def _merged(
    parameter: Parameter,
    adapters: Iterable[Adapter],
    alpha: float,
    made: dict[str, TensorEntry],
    model: Model,
) -> Value:
    """The weight with the parts of its adapters added; `made` gets the tensors that are computed for it."""
    main, weight = parameter.main, parameter.weight
    if main.dtype not in CASTABLE or len(main.shape) != 2:
        raise MappingError(f"nothing is added to a {main.dtype} tensor of shape {main.shape}")
    name = parameter.name if parameter.expert is None else f"{parameter.name} of expert {parameter.expert}"
    parts: dict[int, Value] = {}  # by their first row
    free = [Rows(0, main.shape[0])]
    for adapter in adapters:
        rows = rows_of(adapter, parameter, model.common.settings)
        key = f"{name} with its adapter{f' ({adapter.part})' if adapter.part else ''}"
        base = concat(name, [main.rows(*r) for r in rows])
        wide = "float64" if main.dtype == "float64" else "float32"
        inputs = (replace(base, dtype=wide), adapter.left, adapter.right)
        factors = tuple(value.sources[0].key for value in (adapter.left, adapter.right))
        kernel = AddLowRank(main.dtype, alpha / adapter.rank, (factors[0], factors[1]))
        made[key] = made_entry(key, Made(kernel, inputs))
        at = 0
        for start, size in rows:
            parts[start] = replace(made[key].value.rows(at, size), dtype=weight.dtype)
            at += size
        free = [part for one in free for part in _without(one, rows)]
    parts |= {rows.start: weight.rows(*rows) for rows in free}
    return concat(name, [parts[start] for start in sorted(parts)])


def _without(one: Rows, taken: Iterable[Rows]) -> Iterable[Rows]:
    start = one.start
    for rows in sorted(taken):
        if rows.stop <= start or rows.start >= one.stop:
            continue
        if rows.start > start:
            yield Rows(start, rows.start - start)
        start = max(start, rows.stop)
    if start < one.stop:
        yield Rows(start, one.stop - start)


def rows_of(adapter: Adapter, parameter: Parameter, args: Mapping[str, object]) -> list[Rows]:
    """The rows of a weight that an adapter is added to, in the order of the adapter's.

    linear_qkv has the queries, the key and the value of each query group one after another (Bridge
    peft/canonical_lora.py `_interleave_qkv`), linear_fc1 the gate and then the up half.
    """
    whole, part = parameter.shape[0], adapter.part
    if part in ("q", "k", "v"):
        model = read_model_args(args)
        queries, dim = (
            model.num_attention_heads // model.num_query_groups * model.kv_channels,
            model.kv_channels,
        )
        size, offset = {"q": (queries, 0), "k": (dim, queries), "v": (dim, queries + dim)}[part]
        step = queries + 2 * dim
        rows_in_order = [Rows(g * step + offset, size) for g in range(model.num_query_groups)]
        whole -= step * model.num_query_groups
        if whole:
            raise MappingError(
                f"{parameter.shape[0]} rows are not those of {model.num_query_groups} query groups"
            )
    elif part:
        rows_in_order = [Rows(whole // 2 * (part == "up"), whole // 2)]
    else:
        rows_in_order = [Rows(0, whole)]
    wanted = (sum(rows.size for rows in rows_in_order), parameter.shape[1])
    shape = (adapter.left.shape[0], adapter.right.shape[1])
    if shape != wanted:
        raise MappingError(f"its adapter{part and f' ({part})'} makes {shape}, where the weight has {wanted}")
    return rows_in_order
