"""Low-rank adapters (LoRA) in Megatron checkpoints: which tensors they are, and which weights they are added to.

Megatron-Bridge (peft/utils.py `ParallelLinearAdapter`, peft/canonical_lora.py) and NeMo 2 put next to the weight of a
linear its A (`linear_in`) and B (`linear_out`), layers stacked as its weights are::

    decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight         (layers, rank, in)
    decoder.layers.self_attention.linear_qkv.adapter.linear_out.weight        (layers, out, rank)
    decoder.layers.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight   of its queries alone; _k, _v
    decoder.layers.mlp.linear_fc1.adapter.adapter_gate.linear_in.weight           of its gate alone; _up
    decoder.layers.mlp.experts.experts.linear_fc1.adapter.linear_in.weight    one for all experts of a rank
    decoder.layers.mixer.in_proj.adapter.linear_out.weight.z                  B in the parts of its weight

`linear_in` and `linear_out` of torch's own linears have no `adapter.` in front. In a running model the weight itself
has `to_wrap.` in its name. The part that is added is ``alpha / rank * (B @ A)``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeGuard

from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, list_problems, raise_if
from ckpt_tools.megatron.keys import EXPERTS, expert_of, role_of, stacked_layers, strip_wrappers
from ckpt_tools.model.catalog import Catalog, TensorEntry, Value, concat
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.views import Select

WRAPPED = ".to_wrap."
_FACTOR = re.compile(
    r"(?P<module>.+?)(?P<adapter>\.adapter)?(?:\.adapter_(?P<part>q|k|v|gate|up))?"
    r"\.linear_(?P<side>in|out)\.weight(?:\.(?P<piece>\w+))?"
)
_OTHER = {
    "weight_magnitude": "DoRA: its merged weight is scaled row by row. Merge it in Megatron-Bridge",
    ".lora_": "PEFT's own modules inside Megatron (ms-swift). `swift export --mcore_adapters RUN --to_hf true` of "
    "ms-swift merges them and writes a Hugging Face model, which import-hf reads",
    "adapter_layer.": "an adapter of NeMo 1, which is not read. Merge it in NeMo 1",
}


def is_finite_number(value: object) -> TypeGuard[int | float]:
    """Whether an entry of an adapter's settings is a number to compute with; JSON's true is 1 to Python."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class FactorName(NamedTuple):
    """What the key of an adapter's tensor names; `module` without layer numbers where layers are stacked."""

    module: str
    part: str
    side: str
    piece: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """The part that is added to (some rows of) one weight: `scale` times B @ A, both as float32 or float64.

    `base` is the weight's `torch_dist` name, its layer written out; the experts of a layer are several weights of
    one name. `expert` None: of all of them. `part` says which rows: q, k, v, gate, up, or "" for all.
    """

    base: str
    part: str
    expert: int | None
    left: Value
    right: Value

    @property
    def rank(self) -> int:
        return self.right.shape[0]

    @property
    def label(self) -> str:
        expert = "" if self.expert is None else f" of expert {self.expert}"
        return f"{self.base}{expert}{f' ({self.part})' if self.part else ''}"


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What the job that trained adapters says of them; None where it is silent."""

    alpha: float | None = None
    dim: float | None = None  # the rank, which the matrices show too
    gated: bool | None = None  # whether fc1 has a gate
    expert_ranks: int | None = None  # expert-parallel size
    halved: bool = True  # B of fc1 is stored in halves, as `torch_dist` has it


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """The tensors of a catalog that belong to adapters, and the other ones."""

    factors: Mapping[FactorName, TensorEntry] = field(default_factory=dict)
    others: Mapping[str, TensorEntry] = field(default_factory=dict)


def sort_out(catalog: Catalog) -> AdapterTensors:
    """The weights of a checkpoint by whether they belong to an adapter."""
    factors, others, problems = {}, {}, []
    for key, entry in catalog.tensors.items():
        if role_of(key) != "weight":
            continue
        name = adapter_name(key)
        other = not_merged(key)
        if other is not None:
            problems.append(f"{key}: {other}")
        elif name is not None:
            factors[name] = entry
        elif ".adapter." in key and not key.endswith("_extra_state"):
            problems.append(f"{key}: not a matrix of a low-rank adapter")
        else:
            others[key] = entry
    raise_if(problems, UnsupportedCheckpointError, f"{catalog.root} holds adapters that are not merged here")
    return AdapterTensors(factors, others)


def not_merged(key: str) -> str | None:
    """How to merge an adapter that is not merged here, by its key; None for other keys."""
    return next((advice for mark, advice in _OTHER.items() if mark in key), None)


def adapter_name(key: str) -> FactorName | None:
    """What a key names if it is that of A or B of an adapter."""
    match = _FACTOR.fullmatch(strip_wrappers(key))
    if match is None or (match["part"] and not match["adapter"]):
        return None
    return FactorName(
        match["module"].replace(WRAPPED, "."), match["part"] or "", match["side"], match["piece"] or ""
    )


def read_adapters(tensors: AdapterTensors, how: AdapterSettings) -> list[Adapter]:
    adapters: list[Adapter] = []
    problems = [
        f"{entry.key}: its linear_out is missing"
        for name, entry in tensors.factors.items()
        if name.side == "in" and not any(n.side == "out" and n[:2] == name[:2] for n in tensors.factors)
    ]
    for name in sorted(name for name in tensors.factors if name.side == "out"):
        out, into = tensors.factors[name], tensors.factors.get(name._replace(side="in", piece=""))
        if into is None:
            problems.append(f"{out.key}: its linear_in is missing")
            continue
        try:
            adapters += _layers(name, into, out, how)
        except MappingError as error:
            problems.append(str(error))
    raise_if(problems, MappingError, "the adapter is not whole")
    _refuse_lost_experts(adapters, how.expert_ranks)
    return adapters


def _layers(name: FactorName, into: TensorEntry, out: TensorEntry, how: AdapterSettings) -> list[Adapter]:
    """The adapters that two stored tensors hold: one for each layer, and each expert where these are an axis."""
    base, number = expert_of(f"{name.module}.weight{'.' * bool(name.piece)}{name.piece}")
    stacked = stacked_layers(base)
    axes = len(into.shape) - 2
    lead, each_expert = into.shape[: max(axes, 0)], axes > len(stacked)
    fit = (
        axes >= 0
        and len(out.shape) == axes + 2
        and out.shape[:-2] == lead
        and out.shape[-1] == into.shape[-2]
    )
    if not fit or not out.shape[-1]:
        raise MappingError(
            f"{into.key} {into.shape} and {out.key} {out.shape} are not A and B of one adapter"
        )
    if axes != len(stacked) + each_expert or (each_expert and (EXPERTS not in base or number is not None)):
        raise MappingError(f"{into.key}: shape {into.shape} does not fit its name")
    for entry in (into, out):
        if entry.dtype not in CASTABLE:
            raise MappingError(
                f"{entry.key} is {entry.dtype}; adapters are merged from {', '.join(CASTABLE)}"
            )
    at, order = stacked[0] if stacked else 0, _row_order(name, out, how)
    adapters = []
    left, right = (
        replace(entry.value, dtype="float64" if entry.dtype == "float64" else "float32")
        for entry in (out, into)
    )
    for index in itertools.product(*map(range, lead)):
        selected = [Select(0, i) for i in index]
        rows = left.seen(*selected)
        adapters.append(
            Adapter(
                f"{base[:at]}{index[0]}.{base[at:]}" if stacked else base,
                name.part,
                index[-1] if each_expert else number,
                concat(out.key, [rows.rows(*cut) for cut in order]) if order else rows,
                right.seen(*selected),
            )
        )
    return adapters


def _row_order(name: FactorName, out: TensorEntry, how: AdapterSettings) -> list[tuple[int, int]]:
    """The (first, count) of rows of B in the order of the rows it is added to; none if they are in that order.

    Bridge stores B of every fc1 as if it had a gate (`apply_swiglu_sharded_factory`): of each tensor-parallel rank's
    rows the first half is in the first half of the tensor. That is the order of a gated fc1. For the gate or up
    alone, or without a gate, the halves belong together again; chunks show how many ranks there were.
    """
    rows = out.shape[-2]
    starts = sorted({chunk.box.start[-2] for chunk in out.chunks})
    if not (how.halved and name.module.endswith("linear_fc1")) or len(starts) <= 2:
        return []
    if not name.part and how.gated is None:
        raise MappingError(
            f"{out.key}: it is unknown whether fc1 has a gate, on which the order of its rows depends"
        )
    if not name.part and how.gated:
        return []
    step = rows // len(starts)
    if len(starts) % 2 or starts != list(range(0, rows, step)):
        raise MappingError(
            f"{out.key}: {len(starts)} chunks of rows at {starts[:6]} are not two for each rank"
        )
    ranks = len(starts) // 2
    return [((half * ranks + owner) * step, step) for owner in range(ranks) for half in range(2)]


def _refuse_lost_experts(adapters: Iterable[Adapter], expert_ranks: int | None) -> None:
    shared = [a.base for a in adapters if EXPERTS in a.base and a.expert is None]
    if shared and expert_ranks != 1:
        ranks = "how many there were is not known" if expert_ranks is None else f"there were {expert_ranks}"
        raise UnsupportedCheckpointError(
            "every expert-parallel rank trains its own adapter for its experts, and the checkpoint has kept "
            f"that of one rank only ({ranks}); merge them in the job that trained them:\n"
            + list_problems(shared[:4]),
            shared[:4],
        )
