"""`convert`, also under the two names that NVIDIA's users know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options import given_values as v
from ckpt_tools.cli.options import table as t
from ckpt_tools.cli.options.job_sizes import JOB_SIZES, layout_of
from ckpt_tools.cli.options.row import flag, option
from ckpt_tools.cli.options.signature import Given, fill, with_options
from ckpt_tools.model.choices import Format, MegatronFormat

if TYPE_CHECKING:
    from ckpt_tools.commands.job.conversion import Progress
    from ckpt_tools.commands.job.report import ConversionReport
    from ckpt_tools.model.choices import CheckpointKind

    Run: TypeAlias = Callable[[str, str, int | None, bool, Progress], ConversionReport]

InputDir = Annotated[str, typer.Argument(help="A run's root or an iteration directory.")]
OutputDir = Annotated[str, typer.Argument(help="A run's root to make, or one folder named iter_N.")]


# What has a meaning for one direction only; a flag without effect is refused.
_ANY = t.RUNNING | t.READING | {"ignore_keys", "oom_traceback"}
MEANING: dict[Format, frozenset[str]] = {
    "fsdp_dtensor": _ANY | t.FSDP_TARGET | JOB_SIZES | {"check_masters"},
    "torch_dist": _ANY | t.TORCH_DIST_TARGET,
    "dcp": _ANY | t.DCP_TARGET | JOB_SIZES | {"check_masters"},
    "hf": _ANY | {"dtype", "tp", "vocab_size", "hf_config", "max_shard_bytes", "check_masters"},
}
_ALWAYS = {"input_dir", "output_dir", "to"}
AS_JSON = flag("--json", panel=t.RUN, help="The report as JSON on stdout.")
OWN = {
    "iteration": t.ITERATIONS,
    "as_json": AS_JSON,
}
_TO = {
    "to": option(
        Format, "--to", default="fsdp_dtensor",
        help="Format of the output: torch_dist with the fully_reshardable optimizer layout; dcp, a plain PyTorch "
             "state dict. Without --to, a plain state dict of a model that is not Megatron's stays one.",
    )
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command(**page("convert"))(with_options(convert, frozenset().union(*MEANING.values()), _TO | OWN))
    app.command(**page("convert-torch-dist-to-fsdp-dtensor"))(_long_form("fsdp_dtensor", "torch_dist"))
    app.command(**page("convert-fsdp-dtensor-to-torch-dist"))(_long_form("torch_dist", "fsdp_dtensor"))


def convert(
    ctx: typer.Context,
    input_dir: InputDir,
    output_dir: OutputDir,
    *,
    to: Format,
    **given: Any,
) -> None:
    """Convert a checkpoint to another format; the source's own format is detected.

    Nothing but the two directories has to be given: gating, parameter groups and names are decided from the
    checkpoint, and a flag that contradicts it is an error. Run it alone, or under torchrun or srun.
    """
    convert_to(to, input_dir, output_dir, as_meant(ctx, to, given))


def as_meant(ctx: typer.Context, to: Format, given: dict[str, Any]) -> dict[str, Any]:
    """What was given, with what is meant by what was not."""
    _refuse_meaningless(ctx, to)
    given["keep_plain"] = not is_given(ctx, "to")
    if not is_given(ctx, "ep") and to == "torch_dist":
        given["ep"] = None  # as the arguments say, not one rank
    return given


def convert_to(to: Format, source: str, output: str, given: dict[str, Any]) -> None:
    from ckpt_tools.cli.iterations import finish_all
    from ckpt_tools.cli.render.progress import progress_bar
    from ckpt_tools.cli.render.reports import print_report
    from ckpt_tools.commands.job.iterations import convert_iterations, iteration_folder
    from ckpt_tools.commands.job.report import SCHEMA_VERSION, ConversionReport
    from ckpt_tools.formats.storage.files import path_in

    iteration = given.pop("iteration")
    run = RUNS[to](given)
    if iteration != "all":
        carry_out(lambda progress: run(source, output, v.iteration_number(iteration), True, progress), given)
        return
    kinds: tuple[CheckpointKind, ...] = ("safetensors",) if to == "hf" else (to,)
    if given.get("keep_plain"):
        kinds = (*kinds, "dcp")  # a plain state dict stays one
    with progress_bar(given["quiet"]) as progress:
        outcomes = convert_iterations(
            source,
            output,
            kinds,
            given["overwrite"],
            lambda number, tracker: run(
                source,
                # A Hugging Face model has no root: each iteration gets a folder.
                path_in(output, iteration_folder(number)) if to == "hf" else output,
                number,
                tracker,
                progress,
            ),
        )
    finish_all(outcomes, source, given, ConversionReport.as_json, print_report, schema_version=SCHEMA_VERSION)


def carry_out(run: Callable[[Progress], ConversionReport], given: Given) -> None:
    """One conversion with its progress, and its report as it was asked for."""
    from ckpt_tools.cli.render.progress import progress_bar

    with progress_bar(given["quiet"]) as progress:
        done = run(progress)
    finish(done, given["as_json"], given["report"])


def _to_fsdp_dtensor(given: Given) -> Run:
    from ckpt_tools.commands.convert.options import ConvertOptions
    from ckpt_tools.commands.convert.to_fsdp_dtensor import convert_to_fsdp_dtensor

    options = fill(ConvertOptions, given, layout=layout_of(given))
    return lambda source, output, iteration, tracker, progress: convert_to_fsdp_dtensor(
        source, output, replace(options, iteration=iteration, tracker=tracker), progress, given["dry_run"]
    )


def _to_dcp(given: Given) -> Run:
    from ckpt_tools.commands.convert.options import ConvertOptions
    from ckpt_tools.commands.convert.to_dcp import convert_to_dcp

    options = fill(ConvertOptions, given, layout=layout_of(given))
    return lambda source, output, iteration, tracker, progress: convert_to_dcp(
        source, output, replace(options, iteration=iteration, tracker=tracker), progress, given["dry_run"]
    )


def _to_torch_dist(given: Given) -> Run:
    from ckpt_tools.commands.convert.to_torch_dist import ToTorchDistOptions, convert_to_torch_dist
    from ckpt_tools.megatron.torch_dist.write import TorchDistOptions

    extra = given["extra_state"]
    options = fill(
        ToTorchDistOptions,
        given,
        target=fill(TorchDistOptions, given, extra_state=extra != "none"),
        extra_state_template=None if extra in ("derive", "none") else extra,
    )
    return lambda source, output, iteration, tracker, progress: convert_to_torch_dist(
        source, output, replace(options, iteration=iteration, tracker=tracker), progress, given["dry_run"]
    )


def to_hf(given: Given) -> Run:
    """`export-hf`, and `convert --to hf`."""
    from ckpt_tools.commands.huggingface.export_hf import export_hf
    from ckpt_tools.commands.huggingface.export_source import ExportOptions

    options = fill(ExportOptions, given)
    return lambda source, output, iteration, _tracker, progress: export_hf(
        source, output, replace(options, iteration=iteration), progress, given["dry_run"]
    )


RUNS: dict[Format, Callable[[Given], Run]] = {
    "fsdp_dtensor": _to_fsdp_dtensor,
    "torch_dist": _to_torch_dist,
    "dcp": _to_dcp,
    "hf": to_hf,
}


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_meaningless(ctx: typer.Context, to: Format) -> None:
    """Refuse options that would do nothing."""
    from ckpt_tools.errors import UsageError

    useless = [
        p for p in ctx.command.params if p.name not in MEANING[to] | _ALWAYS and is_given(ctx, p.name or "")
    ]
    if useless:
        why = ""
        if to == "torch_dist" and any(p.name in JOB_SIZES for p in useless):
            why = ", which loads at any TP, PP and EP, on any number of GPUs: leave it out"
            sizes = [p for p in ctx.command.params if p.name in JOB_SIZES and is_given(ctx, p.name or "")]
            if others := [p for p in sizes if p not in useless]:
                why += f", and {', '.join(p.opts[0] for p in others)} unless a message asks for it"
        names = ", ".join(p.opts[0] for p in useless)
        raise UsageError(f"{names}: no meaning for a conversion to {to}{why}")


def finish(done: ConversionReport, as_json: bool, file: Path | None) -> None:
    """Print the report on rank 0; write it where asked."""
    from ckpt_tools.cli.render.progress import is_first_rank
    from ckpt_tools.cli.render.render import give_json
    from ckpt_tools.cli.render.reports import print_report

    if not is_first_rank():
        return
    give_json(done.as_json(), as_json, file, done.source)
    if not as_json:
        print_report(done)


def _long_form(to: Format, source: MegatronFormat) -> Callable[..., None]:
    """`convert` with its `--to` fixed and only the options it uses, under its long name."""

    def command(ctx: typer.Context, input_dir: InputDir, output_dir: OutputDir, **given: Any) -> None:
        _expect(source, input_dir, given["iteration"], to)
        convert(ctx, input_dir, output_dir, to=to, **given)

    command.__doc__ = f"Convert a {source} checkpoint to {to}: `convert --to {to}`."
    return with_options(command, MEANING[to], OWN)


def _expect(kind: MegatronFormat, path: str, iteration: str | None, to: Format) -> None:
    """Refuse a source of another kind than the command's name says."""
    from ckpt_tools.errors import UnsupportedCheckpointError
    from ckpt_tools.formats.locate.detect import locate

    number = None if iteration == "all" else v.iteration_number(iteration)
    found = locate(path, number, of_run=True).kind
    if found != kind:
        raise UnsupportedCheckpointError(
            f"{path} is a checkpoint of kind {found}; this command takes {kind}. `convert --to {to}` takes any"
        )
