"""`merge-adapter`: a low-rank adapter (LoRA) merged into its base, as a checkpoint of the base's format.

A Megatron adapter goes into a Megatron checkpoint, or is in one together with its base already (wrapped). The result
has weights only: an optimizer belongs to what it has trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ckpt_tools.commands.adapters.adapter_source import AdapterSource, read_adapter_source
from ckpt_tools.commands.adapters.peft import is_peft
from ckpt_tools.commands.convert.to_fsdp_dtensor import prepare_model
from ckpt_tools.commands.convert.to_torch_dist import write_torch_dist
from ckpt_tools.commands.job.conversion import (
    Conversion,
    MegatronOptions,
    Progress,
    Writer,
    convert,
    like_to_like,
)
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.outputs import refuse_overlap
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.commands.job.read_model import Wanted, keeps_masters, master_targets, read_beside_masters
from ckpt_tools.commands.job.report import ConversionReport, MastersUse
from ckpt_tools.errors import UnsupportedCheckpointError
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.locate.detect import Location, locate
from ckpt_tools.formats.storage.joined_files import FilesBeside
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.adapters import Adapter
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.huggingface.lora.peft import MERGE_WITH_PEFT
from ckpt_tools.megatron.merged import merged_model
from ckpt_tools.megatron.run_state.record import read_record
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import TargetTensor


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
        UnsupportedCheckpointError: checkpoints or adapters of a kind that is not merged.
        MappingError: an adapter that does not fit the base.
        VerificationError: masters that do not round to their weights, or a cast that makes infinities.
        CorruptCheckpointError, StorageError: damaged files, full disks.
    """
    options = replace(options or MergeOptions(), adapter=adapter)
    return convert(base, output, MERGED, options, progress, dry_run)


def plan_merge(opened: Opened, options: MergeOptions, world: int) -> Conversion:
    """Everything up to the first byte; `world` processes write."""
    if opened.location.kind not in ("torch_dist", "fsdp_dtensor"):
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
        masters = _adapted_masters(model, source.adapters)
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


def _adapted_masters(model: Model, adapters: tuple[Adapter, ...]) -> list[TargetTensor]:
    """The masters that something is added to; they must round to the stored weights."""
    names = {adapter.base for adapter in adapters}
    adapted = tuple(p for p in model.parameters if p.name in names and MASTER in p.values)
    if model.common.of_torch_dist:
        return master_targets(replace(model, parameters=adapted))
    return []


def _open(source: str, options: MergeOptions) -> Opened:
    opened = open_checkpoint(source, options.iteration, options.trust_pickle)
    path = options.adapter
    try:
        if opened.location.kind == "safetensors" or (path is not None and is_peft(path)):
            raise UnsupportedCheckpointError(
                f"{source} and {path or 'its adapter'}: a Megatron adapter is merged into a Megatron checkpoint. A "
                "PEFT directory belongs to the Hugging Face model it was trained on: `import-hf HF OUT --adapter "
                f"PEFT` merges it on the way to Megatron; {MERGE_WITH_PEFT} without converting. `export-hf ADAPTER "
                "PEFT --peft --hf-config HF` makes a PEFT directory of a Megatron adapter"
            )
        if path is None:
            return opened
        return replace(opened, files=FilesBeside(opened.files, [open_files(locate(path).path)]))
    except BaseException:
        opened.files.close()
        raise


def _place(source: str, location: Location, output: str, options: MergeOptions) -> Output:
    refuse_overlap(source, location, output)  # first: with the adapter's name it would be said of that
    if options.adapter is not None:
        refuse_overlap(options.adapter, location, output)
    return like_to_like(source, location, output, options)


MERGED = Writer(open=_open, place=_place, plan=plan_merge)
