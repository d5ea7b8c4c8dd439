"""`convert`, also under the two names that NVIDIA's users know, and `build-param-group-map`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckpt_tools.cli import options as v
from ckpt_tools.cli import table as t
from ckpt_tools.cli.job_sizes import JOB_SIZES, layout_of
from ckpt_tools.cli.options import flag, option
from ckpt_tools.cli.table import Given, fill, with_options
from ckpt_tools.cli.writing import carry_out
from ckpt_tools.model.choices import Format, MegatronFormat

if TYPE_CHECKING:
    from ckpt_tools.commands.job.conversion import Progress
    from ckpt_tools.commands.job.report import ConversionReport
    from ckpt_tools.model.choices import CheckpointKind

InputDir = Annotated[str, typer.Argument(help="A run, or one of its iterations.")]


# What has a meaning for one direction only; a flag without effect is refused.
_ANY = t.RUNNING | t.READING | {"ignore_keys", "oom_traceback"}
MEANING: dict[Format, frozenset[str]] = {
    "fsdp_dtensor": _ANY | t.FSDP_TARGET | JOB_SIZES | {"check_masters"},
    "torch_dist": _ANY | t.TORCH_DIST_TARGET,
    "dcp": _ANY | t.DCP_TARGET | JOB_SIZES | {"check_masters"},
    "hf": _ANY | {"dtype", "tp", "vocab_size", "hf_config", "max_shard_bytes", "check_masters"},
}
_ALWAYS = {"input_dir", "output_dir", "to"}
AS_JSON = flag("--json", panel=t.RUN, help="Print the report as JSON.")
OWN = {
    "iteration": t.ITERATIONS,
    "as_json": AS_JSON,
}
_TO = {
    "to": option(
        Format, "--to", default="fsdp_dtensor",
        help="Format of the output: fsdp_dtensor for Megatron-FSDP, torch_dist for 3D parallelism, dcp for any "
             "PyTorch program, hf for transformers.",
    )
}  # fmt: skip


_MAP = {
    "output": option(
        Path, "-o", "--output", callback=v.in_a_folder, help="File to write. Default: stdout."
    ),
    "explain": flag("--explain", help="Say on stderr which rule placed each parameter."),
}  # fmt: skip


def convert(
    ctx: typer.Context,
    input_dir: InputDir,
    output_dir: t.OutputDir,
    *,
    to: Format,
    **given: Any,
) -> None:
    """Convert a checkpoint to another format, or for a job of another size.

    Two paths are enough: the rest is read from the checkpoint, and an option that contradicts it is an error. Run it
    alone, or under torchrun or srun.
    """
    _refuse_meaningless(ctx, to)
    given["keep_plain"] = not is_given(ctx, "to")
    if not is_given(ctx, "ep") and to == "torch_dist":
        given["ep"] = None  # as the arguments say, not one rank
    convert_to(to, input_dir, output_dir, given)


def convert_to(to: Format, source: str, output: str, given: dict[str, Any]) -> None:
    """Convert one iteration or all, and print the report. `export-hf` is `convert --to hf`."""
    from ckpt_tools.commands.job.iterations import iteration_folder
    from ckpt_tools.commands.job.report import SCHEMA_VERSION
    from ckpt_tools.formats.storage.files import path_in

    function, options = _library(to, given)
    # A Hugging Face model has no root: each iteration gets a folder.
    in_folders = to == "hf" and given["iteration"] == "all"

    def run(options: Any, progress: Progress) -> ConversionReport:
        place = path_in(output, iteration_folder(options.iteration)) if in_folders else output
        report: ConversionReport = function(source, place, options, progress, given["dry_run"])
        return report

    kinds: tuple[CheckpointKind, ...] = ("safetensors",) if to == "hf" else (to,)
    if given.get("keep_plain"):
        kinds = (*kinds, "dcp")  # a plain state dict stays one
    carry_out(
        source,
        output,
        given,
        options,
        run,
        kinds=kinds,
        schema_version=SCHEMA_VERSION,
    )


def _library(to: Format, given: Given) -> tuple[Any, Any]:
    """The library's function that converts to a format, and its options."""
    if to == "hf":
        from ckpt_tools.commands.huggingface.export_hf import export_hf
        from ckpt_tools.commands.huggingface.export_source import ExportOptions

        return export_hf, fill(ExportOptions, given)
    if to == "torch_dist":
        from ckpt_tools.commands.convert.to_torch_dist import ToTorchDistOptions, convert_to_torch_dist
        from ckpt_tools.megatron.torch_dist.write import TorchDistOptions

        extra = given["extra_state"]
        return convert_to_torch_dist, fill(
            ToTorchDistOptions,
            given,
            target=fill(TorchDistOptions, given, extra_state=extra != "none"),
            extra_state_template=None if extra in ("derive", "none") else extra,
        )
    from ckpt_tools.commands.job.conversion import ConvertOptions

    options = fill(ConvertOptions, given, layout=layout_of(given))
    if to == "dcp":
        from ckpt_tools.commands.convert.to_dcp import convert_to_dcp

        return convert_to_dcp, options
    from ckpt_tools.commands.convert.to_fsdp_dtensor import convert_to_fsdp_dtensor

    return convert_to_fsdp_dtensor, options


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option was typed."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_meaningless(ctx: typer.Context, to: Format) -> None:
    """Refuse options that would do nothing, and name the `--to` that they fit."""
    from ckpt_tools.errors import UsageError

    given = {p.name or "": p.opts[0] for p in ctx.command.params if is_given(ctx, p.name or "")}
    given = {name: spelled for name, spelled in given.items() if name not in _ALWAYS}
    useless = [name for name in given if name not in MEANING[to]]
    if not useless:
        return
    why = ""
    fitting = [other for other, names in MEANING.items() if given.keys() <= names]
    if to == "torch_dist" and not JOB_SIZES.isdisjoint(useless):
        why = ", which loads at any TP, PP and EP, on any number of GPUs: leave it out"
        if others := [spelled for name, spelled in given.items() if name in JOB_SIZES - {*useless}]:
            why += f", and {', '.join(others)} unless a message asks for it"
    elif fitting and "to" in {p.name for p in ctx.command.params}:
        why = f"; it has one with {' or '.join(f'--to {other}' for other in fitting)}"
    raise UsageError(
        f"{', '.join(given[name] for name in useless)}: no meaning for a conversion to {to}{why}"
    )


def _long_form(to: Format, source: MegatronFormat) -> Callable[..., None]:
    """`convert` with its `--to` fixed and only the options it uses, under its long name."""

    def command(ctx: typer.Context, input_dir: InputDir, output_dir: t.OutputDir, **given: Any) -> None:
        _expect(source, input_dir, given["iteration"], to)
        convert(ctx, input_dir, output_dir, to=to, **given)

    command.__doc__ = f"Convert a {source} checkpoint to {to}: `convert --to {to}`."
    return with_options(command, MEANING[to], OWN)


def _expect(kind: MegatronFormat, path: str, iteration: int | Literal["all"] | None, to: Format) -> None:
    """Refuse a source of another kind than the command's name says."""
    from ckpt_tools.errors import UnsupportedCheckpointError
    from ckpt_tools.formats.locate.detect import locate

    found = locate(path, None if iteration == "all" else iteration, of_run=True).kind
    if found != kind:
        raise UnsupportedCheckpointError(
            f"{path} is a checkpoint of kind {found}; this command takes {kind}. `convert --to {to}` takes any"
        )


def build_param_group_map(
    source: Annotated[
        str, typer.Argument(help="A map dump, or a torch_dist checkpoint to derive the map from.")
    ],
    **given: Any,
) -> None:
    """Write a param_to_param_group_map.json: from a training job's dump, or derived from a checkpoint alone."""
    from ckpt_tools.cli.render import escape, json_text, tell, write_text
    from ckpt_tools.commands.convert.to_fsdp_dtensor import build_group_map
    from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions

    found = build_group_map(source, fill(TargetOptions, given), given["iteration"])
    write_text(given["output"] or Path("-"), json_text(dict(found.groups), 2) + "\n", source)
    if given["explain"]:
        for name, rule in found.rules.items():
            tell(f"{escape(name)}: group {found.groups[name]} ({rule})", sys.stderr)


COMMANDS = {
    "convert": with_options(convert, frozenset().union(*MEANING.values()), _TO | OWN),
    "convert-torch-dist-to-fsdp-dtensor": _long_form("fsdp_dtensor", "torch_dist"),
    "convert-fsdp-dtensor-to-torch-dist": _long_form("torch_dist", "fsdp_dtensor"),
    "build-param-group-map": with_options(
        build_param_group_map,
        t.OPENING | {"dialect", "layer_spec", "experts", "swiglu", "iteration"},
        _MAP,
    ),
}
