"""`merge-adapter`: a low-rank adapter (LoRA) merged into its base, as a checkpoint of the base's format.

A Megatron adapter goes into a Megatron checkpoint, or is in one together with its base already (wrapped). The result
has weights only: an optimizer belongs to what it has trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.commands.convert.to_dtensors import prepare_model
from ckpt_tools.commands.convert.to_torch_dist import write_torch_dist
from ckpt_tools.commands.job.conversion import (
    Conversion,
    MegatronOptions,
    Progress,
    Writer,
    convert,
    like_to_like,
)
from ckpt_tools.commands.job.opened import Opened, closed_on_error, open_checkpoint
from ckpt_tools.commands.job.outputs import refuse_overlap
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.commands.job.read_model import Wanted, keeps_masters, master_targets, read_beside_masters
from ckpt_tools.commands.job.report import ConversionReport, MastersUse
from ckpt_tools.errors import (
    CorruptCheckpointError,
    MappingError,
    UnsupportedCheckpointError,
    UsageError,
    raise_if,
)
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.locate.detect import Location, locate
from ckpt_tools.formats.locate.run_layouts import snapshot_of
from ckpt_tools.formats.storage.files import Files, read_whole
from ckpt_tools.formats.storage.joined_files import FilesBeside, joined_entry
from ckpt_tools.formats.storage.open_files import open_files
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
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.huggingface.lora.peft import ADAPTER_CONFIG, MERGE_WITH_PEFT
from ckpt_tools.megatron.keys import is_optimizer_key, strip_wrappers
from ckpt_tools.megatron.merged import merged_model
from ckpt_tools.megatron.run_state.common_state import RUN_CONFIG
from ckpt_tools.megatron.run_state.record import read_record
from ckpt_tools.megatron.torch_dist.stacking import slices_of
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from ckpt_tools.model.catalog import TensorEntry, Value
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.views import Select, Source


@dataclass(frozen=True, slots=True)
class MergeOptions(MegatronOptions):
    """Which adapter (None: that in the checkpoint itself), and its alpha where nothing stored tells it."""

    adapter: str | None = None
    alpha: float | None = None


def merge_adapter(
    base: str,
    adapter: str | None,
    output: str,
    options: MergeOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Merge `adapter` into `base` (None: `base` holds both) and publish the weights at `output`.

    Called on every rank.

    Raises:
        UsageError: the adapter's alpha is not known, or an output that cannot be taken.
        UnsupportedCheckpointError: a kind of checkpoint or adapter that cannot be merged.
        MappingError: an adapter that does not fit the base.
        VerificationError: masters that do not round to their weights, or a cast that makes infinities.
        CorruptCheckpointError, StorageError: damaged files, full disks.
    """
    options = replace(options or MergeOptions(), adapter=adapter)
    return convert(base, output, MERGED, options, progress, dry_run)


def plan_merge(opened: Opened, options: MergeOptions, world: int) -> Conversion:
    """Everything up to the first byte; `world` processes write."""
    if not opened.format.is_run:
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is {opened.location.kind}; adapters are merged into torch_dist and fsdp_dtensor "
            "checkpoints"
        )
    with _adapter_of(opened, options) as (base, source):
        wanted = Wanted(ignore_keys=options.ignore_keys, unknown_keys=True)
        advice = f"`strip {base.location.path} OUT --check-masters none` leaves them out; merge into what it writes."
        model = read_beside_masters(base, wanted, options.write, advice)
        if base.location.kind == "torch_dist":
            model = replace(model, record=read_record(base.files))
        merged = merged_model(source.into(model), source.adapters, source.alpha)
        dropped = "weights only are written: optimizer, scheduler and random number states belong to the base"
        merged = replace(merged, notes=(*merged.notes, *source.notes, dropped))
        if base.location.kind == "torch_dist":
            made = write_torch_dist(merged, base, TorchDistOptions(weights_only=True), world)
        else:
            target, layout = TargetOptions(weights_only=True), Layout(world=world, of_job=False)
            prepared = prepare_model(merged, base.files, target, layout)
            made = prepared.planned(layout, base.location.iteration)
        # The masters that something is added to must round to the stored weights.
        names = {adapter.base for adapter in source.adapters}
        adapted = tuple(p for p in model.parameters if p.name in names and MASTER in p.values)
        masters = master_targets(replace(model, parameters=adapted)) if model.common.of_torch_dist else []
    use: MastersUse = "merged" if masters or keeps_masters(model) else "left_out" if model.unread else "none"
    return replace(made, masters=use, must_round=masters, fp8_recipe=model.settings.fp8_recipe)


@contextmanager
def _adapter_of(opened: Opened, options: MergeOptions) -> Iterator[tuple[Opened, AdapterSource]]:
    """The base without adapters, and the adapter that goes into it: its own, or that of another checkpoint."""
    if options.adapter is None:
        source = read_adapter_source(opened, options.alpha, opened, ": name its adapter behind it")
        yield source.base_of(opened), source
        return
    with open_checkpoint(options.adapter, trust_pickle=options.trust_pickle) as adapter:
        source = read_adapter_source(adapter, options.alpha, opened)
        yield opened, source


def _open(source: str, options: MergeOptions) -> Opened:
    opened = open_checkpoint(source, options.iteration, options.trust_pickle)
    path = options.adapter
    with closed_on_error(opened.files):
        if opened.location.kind == "safetensors" or (path is not None and _is_peft(path)):
            raise UnsupportedCheckpointError(
                f"{source} and {path or 'its adapter'}: a Megatron adapter is merged into a Megatron checkpoint. A "
                "PEFT directory belongs to the Hugging Face model it was trained on: `import-hf HF OUT --adapter "
                f"PEFT` merges it on the way to Megatron; {MERGE_WITH_PEFT} without converting. `export-hf ADAPTER "
                "PEFT --peft --hf-config HF` makes a PEFT directory of a Megatron adapter"
            )
        if path is None:
            return opened
        return replace(opened, files=FilesBeside(opened.files, [open_files(locate(path).path)]))


def _is_peft(path: str) -> bool:
    with closing(open_files(snapshot_of(path))) as files:
        return files.exists(ADAPTER_CONFIG)


def _place(source: str, location: Location, output: str, options: MergeOptions) -> Output:
    refuse_overlap(source, location, output)  # first: with the adapter's name it would be said of that
    if options.adapter is not None:
        refuse_overlap(options.adapter, location, output)
    return like_to_like(source, location, output, options)


MERGED = Writer(open=_open, place=_place, plan=plan_merge)


_MERGED = ("LoRA", "CanonicalLoRA", "VLMLoRA")  # classes of Bridge's `peft` section


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter with its scale, `whole` weights that were trained with it, and all their tensors' entries."""

    path: str
    adapters: tuple[Adapter, ...]
    alpha: float
    told_by: str
    entries: Mapping[str, TensorEntry]
    whole: Mapping[str, TensorEntry]

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
        what = f"{self.path} holds weights whole that the base does not have, or in another shape"
        raise_if(wrong, MappingError, what)

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
    value, alpha_source = _alpha(how, alpha, location.path)
    joined = _joined(adapter, tensors, is_wrapped)
    adapters = read_adapters(joined, how)
    wrong = [f"{one.label}: rank {one.rank}" for one in adapters if how.dim not in (None, one.rank)]
    raise_if(wrong, MappingError, f"{RUN_CONFIG} says that the adapters have dim {how.dim}")
    entries = {e.key: e for e in (*joined.factors.values(), *joined.others.values())}
    whole = {
        strip_wrappers(key).replace(WRAPPED, "."): entry
        for key, entry in joined.others.items()
        if not is_wrapped
    }
    return AdapterSource(location.path, tuple(adapters), value, alpha_source, entries, whole)


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
