"""A Megatron checkpoint that holds a low-rank adapter: alone, or wrapped around its base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.errors import (
    CorruptCheckpointError,
    MappingError,
    UnsupportedCheckpointError,
    UsageError,
    list_problems,
)
from ckpt_tools.formats.storage.files import Files, read_whole
from ckpt_tools.formats.storage.joined_files import joined_entry
from ckpt_tools.formats.untrusted_documents import DocumentError, parse_yaml
from ckpt_tools.megatron.adapters import (
    WRAPPED,
    Adapter,
    AdapterSettings,
    AdapterTensors,
    adapter_name,
    is_finite_number,
    read_adapters,
    sort_out,
)
from ckpt_tools.megatron.keys import is_optimizer_key, strip_wrappers
from ckpt_tools.megatron.run_state.common_state import RUN_CONFIG
from ckpt_tools.megatron.torch_dist.stacking import slices_of
from ckpt_tools.model.catalog import TensorEntry, Value
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.views import Select, Source

_MERGED = ("LoRA", "CanonicalLoRA", "VLMLoRA")  # classes of Bridge's `peft` section


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter with its scale, `whole` weights that were trained beside it, and all their tensors' entries."""

    path: str
    adapters: tuple[Adapter, ...]
    alpha: float
    told_by: str
    entries: Mapping[str, TensorEntry]
    whole: Mapping[str, TensorEntry]
    is_wrapped: bool

    @property
    def summary(self) -> str:
        """How many there are, their ranks and scales."""
        ranks = sorted({adapter.rank for adapter in self.adapters})
        scales = ", ".join(f"{self.alpha / rank:g}" for rank in ranks)
        return (
            f"{len(self.adapters):,} adapters of rank {', '.join(map(str, ranks))} with scale {scales} (alpha "
            f"{self.alpha:g}, by {self.told_by})"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        found = [f"{self.summary} were added, in float64 and rounded once"]
        if self.whole:
            found.append(f"taken from the adapter, which holds them whole: {', '.join(self.whole)}")
        return tuple(found)

    def base_of(self, opened: Opened) -> Opened:
        """The wrapped checkpoint without its adapter: the weights as they are stored, and no optimizer."""
        catalog = opened.catalog
        tensors = {}
        for key, entry in catalog.tensors.items():
            if not is_optimizer_key(key) and adapter_name(key) is None:
                plain = key.replace(WRAPPED, ".")
                tensors[plain] = replace(entry, key=plain)
        objects = {
            plain: replace(entry, key=plain)
            for key, entry in catalog.objects.items()
            if not is_optimizer_key(key) and ".adapter." not in key
            for plain in [key.replace(WRAPPED, ".")]
        }
        return replace(opened, catalog=replace(catalog, tensors=tensors, objects=objects))

    def into(self, model: Model) -> Model:
        """The base with the adapter's tensors in its catalog, and the weights that the adapter holds whole."""
        parts = {
            (part.name, part.expert): (part, entry.key)
            for name, entry in self.whole.items()
            for part in slices_of(replace(entry, key=name))
        }
        shapes = {(p.name, p.expert): p.shape for p in model.parameters}
        wrong = [part.name for place, (part, _) in parts.items() if shapes.get(place) != part.shape]
        if wrong:
            raise MappingError(
                f"{self.path} holds weights whole that the base does not have, or in another shape:\n"
                + list_problems(wrong),
                wrong,
            )

        def taken(p: Parameter) -> Parameter:
            if (p.name, p.expert) not in parts:
                return p
            part, key = parts[p.name, p.expert]
            source = Source(key, tuple(Select(0, i) for i in part.lead))
            return replace(p, values={WEIGHT: Value(p.weight.dtype, p.shape, (source,))})

        catalog = replace(model.catalog, tensors={**model.catalog.tensors, **self.entries})
        return replace(model, catalog=catalog, parameters=tuple(map(taken, model.parameters)))


def read_adapter_source(
    adapter: Opened, alpha: float | None, base: Opened, otherwise: str = ""
) -> AdapterSource:
    """The adapter in a checkpoint. `base` is what it belongs to: the same one when it is wrapped.

    Args:
        otherwise: what to do where it holds none.
    """
    is_wrapped = adapter is base
    location = adapter.location
    if location.kind == "safetensors":
        raise UnsupportedCheckpointError(f"{location.path} is a Hugging Face model, not an adapter")
    tensors = sort_out(adapter.catalog)
    if not tensors.factors:
        raise UnsupportedCheckpointError(
            f"{location.path} holds no low-rank adapter (no `.adapter.` keys){otherwise}"
        )
    how = _settings(adapter, base)
    told, told_by = _alpha(how, alpha, location.path)
    joined = _joined(adapter, tensors, is_wrapped)
    adapters = read_adapters(joined, how)
    wrong = [f"{one.label}: rank {one.rank}" for one in adapters if how.dim not in (None, one.rank)]
    if wrong:
        raise MappingError(
            f"{RUN_CONFIG} says that the adapters have dim {how.dim}:\n" + list_problems(wrong), wrong
        )
    entries = {e.key: e for e in (*joined.factors.values(), *joined.others.values())}
    whole = {
        strip_wrappers(key).replace(WRAPPED, "."): entry
        for key, entry in joined.others.items()
        if not is_wrapped
    }
    return AdapterSource(location.path, tuple(adapters), told, told_by, entries, whole, is_wrapped)


def _joined(adapter: Opened, tensors: AdapterTensors, is_wrapped: bool) -> AdapterTensors:
    """The same with entries that name the adapter's files among those of its base."""
    if is_wrapped:
        return AdapterTensors(tensors.factors, {})

    def entry(one: TensorEntry) -> TensorEntry:
        return joined_entry(adapter.files, one, f"{one.key} of {adapter.location.path}")

    return AdapterTensors(
        {name: entry(one) for name, one in tensors.factors.items()},
        {key: entry(one) for key, one in tensors.others.items()},
    )


def _settings(adapter: Opened, base: Opened) -> AdapterSettings:
    """What the checkpoints say of the adapter."""
    section = _peft_section(adapter.files)
    name = str(section.get("_target_", "LoRA")).rpartition(".")[2]
    if name not in _MERGED:
        raise UnsupportedCheckpointError(
            f"{adapter.location.path}: {RUN_CONFIG} says that the adapter is {name}; merged are {', '.join(_MERGED)}"
        )
    states = (adapter.common, base.common)
    gated = next(
        (g for s in states for n in ("swiglu", "gated_linear_unit") if (g := s.arg(n)) is not None), None
    )
    alpha, dim = (section.get(n) for n in ("alpha", "dim"))
    if section.get("normalize_moe_lora"):
        dim = None  # adapters of experts have a smaller one
    return AdapterSettings(
        alpha if is_finite_number(alpha) else None,
        dim if is_finite_number(dim) else None,
        gated if gated is None else bool(gated),
        adapter.common.arg("expert_model_parallel_size"),
        adapter.location.kind == "torch_dist",
    )


def _peft_section(files: Files) -> Mapping[str, Any]:
    """The `peft` section of Bridge's run_config.yaml; empty without one."""
    if not files.exists(RUN_CONFIG):
        return {}
    try:
        config = parse_yaml(read_whole(files, RUN_CONFIG))
    except DocumentError as error:
        raise CorruptCheckpointError(
            f"{files.location}/{RUN_CONFIG}: not readable YAML ({error})."
        ) from error
    section = config.get("peft") if isinstance(config, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _alpha(how: AdapterSettings, given: float | None, path: str) -> tuple[float, str]:
    if given is not None and not is_finite_number(given):
        raise UsageError(f"--alpha {given}: a number is expected")
    if given is None and how.alpha is None:
        raise UsageError(
            f"{path}: no {RUN_CONFIG} with a `peft` section says alpha, without it nothing can be merged; give that "
            "of the training job with --alpha"
        )
    if given is not None and how.alpha not in (None, given):
        raise UsageError(f"--alpha {given:g}: {RUN_CONFIG} of {path} says {how.alpha:g}; leave it out")
    return (given, "--alpha") if how.alpha is None and given is not None else (how.alpha or 0.0, RUN_CONFIG)
