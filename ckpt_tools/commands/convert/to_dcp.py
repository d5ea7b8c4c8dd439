"""WRITE plain DCP: what any program that uses `torch.distributed.checkpoint` loads, from every source."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.commands.convert.relayout import need_job, plain_layout, prepare_hf, prepare_plain
from ckpt_tools.commands.convert.to_fsdp_dtensor import prepare_model
from ckpt_tools.commands.huggingface.folder import CONFIG, architecture_of, read_config
from ckpt_tools.commands.job.conversion import (
    Conversion,
    ConvertOptions,
    MegatronOptions,
    Prepared,
    Progress,
    Writer,
    convert,
    like_to_like,
    open_source,
)
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.outputs import is_root
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.commands.job.read_model import Wanted, read_model
from ckpt_tools.commands.job.report import ConversionReport
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import AnyPath
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.torch_dist.read import Extent


def convert_to_dcp(
    source: AnyPath,
    output: AnyPath,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Convert the checkpoint at `source` to a plain PyTorch state dict at `output`; called on every rank.

    Megatron checkpoints get the keys of `megatron.dcp.write`, Hugging Face models ``model.<their name>``. A source
    that is a plain state dict already keeps its keys and is re-sharded.

    Raises the errors of `convert_to_fsdp_dtensor`.
    """
    return convert(source, output, TO_DCP, options or ConvertOptions(), progress, dry_run)


def plan_dcp(opened: Opened, options: ConvertOptions, world: int) -> Conversion:
    """Everything up to the first byte; `world` processes convert."""
    if opened.location.kind == "dcp":
        need_job(opened.location, options)
    layout = plain_layout(options.layout or Layout(world=world, of_job=False))
    prepared = prepare_dcp(opened, options, layout)
    made = prepared.planned(layout, opened.location.iteration, options.check_masters)
    return replace(made, architecture=_architecture(opened))


def _architecture(opened: Opened) -> str | None:
    """What a Hugging Face model calls itself, if it has a config.json."""
    if opened.location.kind != "safetensors" or not opened.files.exists(CONFIG):
        return None
    return architecture_of(read_config(opened.location.path))


def prepare_dcp(opened: Opened, options: ConvertOptions, layout: Layout) -> Prepared:
    """The checkpoint as the plain state dict that a job of `layout` loads.

    Raises the errors of `convert_to_dcp` up to its plan.
    """
    if opened.location.kind == "dcp":
        return prepare_plain(opened, options, layout)
    if opened.location.kind == "safetensors":
        return prepare_hf(opened, options, layout)
    _refuse_halves(options.target)
    optimizer: Extent = "masters" if options.target.weights_only else "whole"
    model = read_model(opened, Wanted(optimizer, options.ignore_keys, workers=options.write.workers))
    return prepare_model(model, opened.files, options.target, layout, "dcp")


def _refuse_halves(target: TargetOptions) -> None:
    """Raise UsageError if options about keys that a plain state dict does not have."""
    plain = TargetOptions()
    asked = {
        "swiglu": target.swiglu is not None or target.swiglu_modules != (),
        "rename_mtp": target.rename_mtp,
        "prefixes": (target.model_prefix, target.state_prefix) != (plain.model_prefix, plain.state_prefix),
    }
    useless = [name for name, is_asked in asked.items() if is_asked]
    if useless:
        raise UsageError(
            f"{', '.join(useless)}: no meaning for a plain state dict: its names are the running model's"
        )


def _place(source: str, location: Location, output: str, options: MegatronOptions) -> Output:
    """A directory of an iteration: who loads it looks for no tracker."""
    plain = location if is_root(source, location) else replace(location, kind="dcp")
    return like_to_like(source, plain, output, options)


TO_DCP = Writer(open=open_source, place=_place, plan=plan_dcp)
