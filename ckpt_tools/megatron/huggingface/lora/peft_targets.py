"""A Megatron adapter as the tensors and settings of a PEFT directory, by the rules that its base is exported with.

A fused linear becomes several: its A is that of each, its B is cut as its rows are (`linear_qkv` in query, key and
value heads, `linear_fc1` in gate and up), so that the product adds the same to every row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.adapters import Adapter
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.lora.peft import PREFIX
from ckpt_tools.megatron.huggingface.mapping.checks import EMBEDDING
from ckpt_tools.megatron.huggingface.mapping.layouts import Layout
from ckpt_tools.megatron.huggingface.mapping.rules import Pair, rule_layout
from ckpt_tools.megatron.keys import EXPERTS
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.target import TargetTensor, rebase
from ckpt_tools.model.views import Permute, Shape, Source

_PLACE = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1}  # of a part among the tensors of its rule
_WHOLE_PARTS = ("qkv", "gate_up")


@dataclass(frozen=True, slots=True)
class PeftTarget:
    tensors: tuple[TargetTensor, ...]
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()


class _Linear(NamedTuple):
    """The adapter of one Hugging Face linear: `module` is its name."""

    module: str
    adapter: Adapter
    left: tuple[Source, ...]  # B, seen in `adapter.left`
    rows: int
    turned: bool  # its weight is (in, out)


def peft_target(
    catalog: Catalog, adapters: Iterable[Adapter], pairs: Iterable[Pair], model: ModelArgs, alpha: float, base: str,
    dtype: str | None = None,
) -> PeftTarget:  # fmt: skip
    """The tensors and adapter_config.json of `adapters`; `pairs` are those of the base model `base`."""
    pairs = list(pairs)
    places = {core: (pair, i) for pair in pairs for i, core in enumerate(pair.core)}
    linears: list[_Linear] = []
    problems: list[str] = []
    for adapter in adapters:
        try:
            for core in _cores(adapter, places):
                linears += _linears(adapter, *places[core], model)
        except MappingError as error:
            problems.append(f"{adapter.label}: {error}")
    if problems:
        raise MappingError(
            "the adapter does not fit the Hugging Face model:\n" + list_problems(problems), problems
        )
    shapes = {key: entry.shape for key, entry in catalog.tensors.items()}
    tensors = [tensor for linear in linears for tensor in _tensors(linear, catalog, shapes, dtype)]
    shared = sum(n > 1 for n in Counter(id(linear.adapter) for linear in linears).values())
    notes = (
        (f"{shared:,} adapters are of fused linears: their A is written for each of their parts",)
        if shared
        else ()
    )
    every = {name.removesuffix(".weight") for pair in pairs for name in pair.hf if name.endswith(".weight")}
    return PeftTarget(tuple(tensors), _config(linears, every, alpha, base), notes)


def _cores(adapter: Adapter, places: Mapping[str, Any]) -> list[str]:
    """The rules' names of the weights that an adapter is added to."""
    head, experts, leaf = adapter.base.partition(EXPERTS)
    if not experts or adapter.expert is not None:
        name = f"{head}{experts}{adapter.expert}.{leaf}" if experts else adapter.base
        found = [name] if name in places else []
    else:
        found = [n for n in places if n.startswith(head + EXPERTS) and n.endswith(f".{leaf}")]
    if not found:
        raise MappingError("no rule has this weight")
    return found


def _linears(adapter: Adapter, pair: Pair, place: int, model: ModelArgs) -> Iterator[_Linear]:
    if adapter.base == EMBEDDING or len(pair.shape) != 2:
        raise MappingError("only adapters of linears are written")
    if pair.rule.parts:
        raise MappingError(
            f"its weight is a part of {pair.hf[0]}, and PEFT has no form for an adapter of a part"
        )
    if len(pair.core) > 1:
        raise MappingError(
            f"{pair.hf[0]} holds all experts, which PEFT adapts as a parameter and not as a linear"
        )
    rows, rank = adapter.left.shape
    if adapter.right.shape[1] != pair.shape[1]:
        raise MappingError(f"its A has {adapter.right.shape[1]} columns, the weight {pair.shape[1]}")
    if adapter.part:
        yield _part(adapter, pair, model)
        return
    if rows != pair.shape[0]:
        raise MappingError(f"its B has {rows} rows, the weight {pair.shape[0]}")
    layout: Layout = rule_layout(pair.rule, model)((rows, rank), model)
    for i, name in enumerate(pair.hf):
        links = [link for link in layout.links if link.hf == i]
        seen = layout.tensors[i].seen
        turned = bool(links[0].order)
        back = (Permute((1, 0)),) if turned else ()
        left = tuple(Source("B", (*link.to_hf(seen), *back)) for link in links)
        yield _Linear(name.removesuffix(".weight"), adapter, left, seen[1] if turned else seen[0], turned)


def _part(adapter: Adapter, pair: Pair, model: ModelArgs) -> _Linear:
    """The linear of queries, keys, values, gate or up alone; both sides have its rows in the same order."""
    i = _PLACE[adapter.part]
    plain = pair.rule.layout in _WHOLE_PARTS and not model.rotary_interleaved and not model.glu_interleave
    if not plain or i >= len(pair.hf):
        raise MappingError(f"the part {adapter.part!r} is not a separate linear in the Hugging Face model")
    rows = adapter.left.shape[0]
    if rows != pair.tensors[i].shape[0]:
        raise MappingError(f"its B has {rows} rows, {pair.hf[i]} {pair.tensors[i].shape[0]}")
    return _Linear(pair.hf[i].removesuffix(".weight"), adapter, (Source("B"),), rows, False)


def _tensors(
    linear: _Linear, catalog: Catalog, shapes: Mapping[str, Shape], dtype: str | None
) -> Iterator[TargetTensor]:
    adapter = linear.adapter
    factors = (
        ("lora_A", adapter.right, adapter.right.shape, (Source("A"),)),
        ("lora_B", adapter.left, (linear.rows, adapter.rank), linear.left),
    )
    for name, value, shape, sources in factors:
        stored = dtype or catalog.tensors[value.sources[0].key].dtype
        target = TargetTensor(f"{PREFIX}{linear.module}.{name}.weight", stored, shape, sources)
        yield from rebase([target], {"A": value, "B": value}, shapes)


def _config(linears: list[_Linear], every: set[str], alpha: float, base: str) -> dict[str, Any]:
    """adapter_config.json; modules of another rank than most are listed, and their scale is alpha / rank too."""
    ranks = Counter(linear.adapter.rank for linear in linears)
    rank = ranks.most_common(1)[0][0]
    turned = {linear.turned for linear in linears}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": _target_modules({linear.module for linear in linears}, every),
        "rank_pattern": {one.module: one.adapter.rank for one in linears if one.adapter.rank != rank},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": turned == {True},
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _target_modules(adapted: set[str], every: set[str]) -> list[str]:
    """The last names of the adapted modules where they mean no other module of the model, else whole names."""
    last = {name: name.rpartition(".")[2] for name in every}
    others = {last[name] for name in every - adapted}
    return sorted({name if last.get(name, name) in others else last.get(name, name) for name in adapted})


def with_vocabulary(model: ModelArgs) -> ModelArgs:
    """The model with as many rows of the vocabulary as it has tokens, which no adapter here depends on."""
    return replace(model, padded_vocab_size=model.vocab_size)
