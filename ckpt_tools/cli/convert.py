"""`convert`, its long names, and `build-param-group-map`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ckpt_tools.cli import options as o
from ckpt_tools.cli.inspect import EnableMsc, TrustPickle
from ckpt_tools.cli.manual import page

if TYPE_CHECKING:
    from ckpt_tools.commands.iterations import Outcome
    from ckpt_tools.commands.outputs import ConversionReport

    Run: TypeAlias = Callable[
        [str, str, int | None, Callable[[int, int], None], bool, bool], ConversionReport
    ]

InputDir = Annotated[str, typer.Argument(help="A run's root or an iteration directory.")]
OutputDir = Annotated[
    str, typer.Argument(help="Like to like: a root for a root, else an iteration directory.")
]


class Format(str, Enum):
    FSDP_DTENSOR = "fsdp_dtensor"
    TORCH_DIST = "torch_dist"
    HF = "hf"


_RUNNING = {
    "input_dir", "output_dir", "to", "iteration", "ignore_keys", "overwrite", "resume", "dry_run", "threads",
    "max_memory", "fsync", "direct", "quiet", "as_json", "report", "trust_pickle", "enable_msc", "oom_traceback",
    "check_source",
    "follow_links",
}  # fmt: skip
# What has a meaning for one direction only; a flag without effect is refused.
_MEANING = {
    Format.FSDP_DTENSOR: _RUNNING | {
        "swiglu", "swiglu_modules", "group_map_file", "strict_map", "state_prefix", "model_prefix", "rename_mtp",
        "target", "aliases", "layer_spec", "experts", "weights_only", "dtype", "vocab_size_padded", "vocab_size",
        "layout", "world_size", "gpus", "dp_shard", "dp_outer", "tp", "cp", "ep", "etp", "pp", "strategy",
        "outer_strategy", "check_masters",
    },
    Format.TORCH_DIST: _RUNNING | {
        "target", "layer_spec", "weights_only", "dtype", "gpus", "tp", "ep", "etp", "extra_state", "stacked",
    },
    Format.HF: _RUNNING | {"dtype", "tp", "vocab_size", "hf_config", "max_shard_size"},
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command(**page("convert"))(convert)
    app.command(**page("convert-torch-dist-to-fsdp-dtensor"))(_long_form(Format.FSDP_DTENSOR, "torch_dist"))
    app.command(**page("convert-fsdp-dtensor-to-torch-dist"))(_long_form(Format.TORCH_DIST, "fsdp_dtensor"))
    app.command(**page("build-param-group-map"))(build_param_group_map)


def convert(
    ctx: typer.Context,
    input_dir: InputDir,
    output_dir: OutputDir,
    *,
    to: Annotated[
        Format,
        typer.Option(
            "--to", help="Format of the output; torch_dist has the fully_reshardable optimizer layout."
        ),
    ] = Format.FSDP_DTENSOR,
    swiglu: o.Swiglu = None,
    swiglu_modules: o.SwigluModules = "",
    group_map_file: o.GroupMapFile = None,
    strict_map: o.StrictMap = False,
    state_prefix: o.StatePrefix = None,
    model_prefix: o.ModelPrefix = "model.module",
    rename_mtp: o.RenameMtp = False,
    target: o.Target = None,
    aliases: o.Aliases = False,
    layer_spec: o.LayerSpecOption = None,
    experts: o.ExpertsOption = None,
    weights_only: o.WeightsOnly = False,
    dtype: o.Dtype = None,
    vocab_size_padded: o.VocabSizePadded = None,
    vocab_size: o.VocabSize = None,
    extra_state: o.ExtraState = "derive",
    stacked: o.Stacked = None,
    hf_config: o.HfConfig = None,
    max_shard_size: o.MaxShardSize = "5GB",
    layout: o.LayoutOption = None,
    world_size: o.WorldSize = None,
    gpus: o.Gpus = None,
    dp_shard: o.DpShard = None,
    dp_outer: o.DpOuter = 1,
    tp: o.Tp = None,
    cp: o.Cp = 1,
    ep: o.Ep = 1,
    etp: o.Etp = None,
    pp: o.Pp = 1,
    strategy: o.Strategy = o.DEFAULT_STRATEGY,
    outer_strategy: o.OuterStrategy = o.DEFAULT_OUTER_STRATEGY,
    iteration: o.Iteration = None,
    check_masters: o.CheckMasters = o.Check.SAMPLE,
    check_source: o.CheckSource = o.SourceCheck.ALL,
    ignore_keys: o.IgnoreKeys = None,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    dry_run: o.DryRun = False,
    threads: o.Threads = 2,
    max_memory: o.MaxMemory = "96MiB",
    fsync: o.Fsync = False,
    direct: o.Direct = False,
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    report: o.ReportFile = None,
    trust_pickle: TrustPickle = False,
    enable_msc: EnableMsc = False,
    oom_traceback: o.OomTraceback = False,
) -> None:
    """Convert a checkpoint to another format; the source's own format is detected.

    Nothing but the two directories has to be given: gating, parameter groups and names are decided from the
    checkpoint, and a flag that contradicts it is an error. Run it alone, or under torchrun or srun.
    """
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.iterations import convert_iterations
    from ckpt_tools.errors import UsageError
    from ckpt_tools.execute.run import WriteOptions

    _refuse_meaningless(ctx, to)
    running = {
        "ignore_keys": tuple(ignore_keys or ()),
        "trust_pickle": trust_pickle,
        "overwrite": overwrite,
        "resume": resume,
        "write": WriteOptions(threads, o.parse_bytes(max_memory), fsync, direct, check_source.value),
    }
    if to is Format.FSDP_DTENSOR:
        sizes = (gpus, dp_shard, dp_outer, tp, cp, ep, etp, pp, strategy, outer_strategy)
        run = _to_fsdp_dtensor(
            running
            | {"layout": o.choose_layout(layout, world_size, *sizes), "check_masters": check_masters.value},
            group_map_file,
            dialect=target.value if target else None,
            layer_spec=layer_spec.value if layer_spec else None,
            experts=experts.value if experts else None,
            swiglu=swiglu,
            swiglu_modules=tuple(name for name in swiglu_modules.split(",") if name),
            rename_mtp=rename_mtp,
            aliases=aliases,
            tp=tp,
            weights_only=weights_only,
            dtype=dtype,
            vocab_size_padded=vocab_size_padded,
            vocab_size=vocab_size,
            strict_map=strict_map,
            model_prefix=model_prefix,
            state_prefix=state_prefix,
        )
    elif to is Format.TORCH_DIST:
        run = _to_torch_dist(
            running,
            extra_state,
            dialect=target.value if target else None,
            layer_spec=layer_spec.value if layer_spec else None,
            stacked=stacked,
            dtype=dtype,
            tp=tp,
            gpus=gpus,
            ep=ep if _is_given(ctx, "ep") else None,
            etp=etp,
            weights_only=weights_only,
        )
    else:
        run = _to_hf(running, hf_config, max_shard_size, dtype=dtype, vocab_size=vocab_size, tp=tp)
    if iteration == "all":
        if to is Format.HF:
            raise UsageError(
                "--iteration all: a Hugging Face model has no iterations; export them one by one"
            )
        with progress_bar(quiet) as progress:
            outcomes = convert_iterations(
                input_dir,
                output_dir,
                to.value,
                overwrite,
                lambda number, tracker: run(input_dir, output_dir, number, progress, dry_run, tracker),
            )
        finish_all(outcomes, input_dir, as_json, report)
        return
    number = _iteration_number(iteration)
    with progress_bar(quiet) as progress:
        done = run(input_dir, output_dir, number, progress, dry_run, True)
    finish(done, as_json, report)


def _iteration_number(iteration: str | None) -> int | None:
    from ckpt_tools.commands.outputs import MAX_DIGITS
    from ckpt_tools.errors import UsageError

    if iteration is None:
        return None
    if not (iteration.isascii() and iteration.isdigit() and len(iteration) <= MAX_DIGITS):
        raise UsageError(f"--iteration {iteration}: give a number, or all")
    return int(iteration)


def _to_fsdp_dtensor(running: dict[str, Any], group_map_file: Path | None, **target: Any) -> Run:
    from ckpt_tools.commands.group_map import load_group_map
    from ckpt_tools.commands.to_fsdp_dtensor import ConvertOptions, convert_to_fsdp_dtensor
    from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions

    group_map = load_group_map(group_map_file) if group_map_file else None
    options = ConvertOptions(target=TargetOptions(group_map=group_map, **target), **running)
    return lambda source, output, iteration, progress, dry_run, tracker: convert_to_fsdp_dtensor(
        source, output, replace(options, iteration=iteration, tracker=tracker), progress, dry_run
    )


def _to_torch_dist(running: dict[str, Any], extra_state: str, **target: Any) -> Run:
    from ckpt_tools.commands.to_torch_dist import ToTorchDistOptions, convert_to_torch_dist
    from ckpt_tools.megatron.torch_dist.write import TorchDistOptions

    template = None if extra_state in ("derive", "none") else extra_state
    wanted = TorchDistOptions(extra_state=extra_state != "none", **target)
    options = ToTorchDistOptions(target=wanted, extra_state_template=template, **running)
    return lambda source, output, iteration, progress, dry_run, tracker: convert_to_torch_dist(
        source, output, replace(options, iteration=iteration, tracker=tracker), progress, dry_run
    )


def _to_hf(running: dict[str, Any], hf_config: Path | None, max_shard_size: str, **target: Any) -> Run:
    from ckpt_tools.commands.export_hf import ExportOptions, export_hf

    config = str(hf_config) if hf_config else None
    options = ExportOptions(
        hf_config=config, max_shard_bytes=o.parse_bytes(max_shard_size), **target, **running
    )
    return lambda source, output, iteration, progress, dry_run, _tracker: export_hf(
        source, output, replace(options, iteration=iteration), progress, dry_run
    )


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_meaningless(ctx: typer.Context, to: Format) -> None:
    """Refuse options that would do nothing."""
    from ckpt_tools.errors import UsageError

    useless = [p for p in ctx.command.params if p.name not in _MEANING[to] and _is_given(ctx, p.name or "")]
    if useless:
        names = ", ".join(p.opts[0] for p in useless)
        raise UsageError(f"{names}: no meaning for a conversion to {to.value}")


def _expect(kind: str, path: str, iteration: str | None, to: Format) -> None:
    """Refuse a source of another kind than the command's name says."""
    from ckpt_tools.errors import UnsupportedCheckpointError
    from ckpt_tools.formats.detect import locate

    found = locate(path, None if iteration == "all" else _iteration_number(iteration)).kind
    if found != kind:
        raise UnsupportedCheckpointError(
            f"{path} is a checkpoint of kind {found}; this command takes {kind}. `convert --to {to.value}` takes any"
        )


def _long_form(to: Format, source: str) -> Callable[..., None]:
    """`convert` with its `--to` fixed and only the options it uses, under the name that NVIDIA's users know."""
    signature = inspect.signature(convert, eval_str=True)
    kept = [p for name, p in signature.parameters.items() if name in _MEANING[to] | {"ctx"} and name != "to"]

    def command(*args: Any, **kwargs: Any) -> None:
        _expect(source, kwargs["input_dir"], kwargs["iteration"], to)
        convert(*args, to=to, **kwargs)

    command.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in kept}
    command.__doc__ = f"Convert a {source} checkpoint to {to.value}: `convert --to {to.value}`."
    return command


def build_param_group_map(
    source: Annotated[
        str, typer.Argument(help="A map dump, or a torch_dist checkpoint to derive the map from.")
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", callback=o.in_a_folder, help="File to write. Default: stdout."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say on stderr which rule placed each parameter.")
    ] = False,
    target: o.Target = None,
    layer_spec: o.LayerSpecOption = None,
    experts: o.ExpertsOption = None,
    swiglu: o.Swiglu = None,
    iteration: Annotated[int | None, typer.Option(help="Iteration of a root, instead of its latest.")] = None,
    enable_msc: EnableMsc = False,
) -> None:
    """Write a param_to_param_group_map.json: from a training job's dump, or derived from a checkpoint alone."""
    from ckpt_tools.cli.render import escape, json_text, write_text
    from ckpt_tools.commands.group_map import build_group_map
    from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions

    options = TargetOptions(
        dialect=target.value if target else None,
        layer_spec=layer_spec.value if layer_spec else None,
        experts=experts.value if experts else None,
        swiglu=swiglu,
    )
    found = build_group_map(source, options, iteration)
    write_text(output or Path("-"), json_text(dict(found.groups), 2) + "\n", source)
    if explain:
        for name, rule in found.rules.items():
            print(f"{escape(name)}: group {found.groups[name]} ({rule})", file=sys.stderr)


def finish(done: ConversionReport, as_json: bool, file: Path | None) -> None:
    """Print the report on rank 0; write it where asked."""
    from ckpt_tools.cli.progress import is_first_rank
    from ckpt_tools.cli.reports import print_report

    if not is_first_rank():
        return
    _write_json(done.as_json(), as_json, file, done.source)
    if not as_json:
        print_report(done)


def finish_all(outcomes: list[Outcome], source: str, as_json: bool, file: Path | None) -> None:
    """Print what became of every iteration on rank 0; the exit code is the worst of all.

    Raises:
        typer.Exit: with that code.
    """
    from ckpt_tools.cli.progress import is_first_rank
    from ckpt_tools.cli.render import escape_lines
    from ckpt_tools.cli.reports import print_outcome
    from ckpt_tools.commands import iterations

    if is_first_rank():
        _write_json(iterations.as_json(outcomes), as_json, file, source)
        for outcome in outcomes:
            if outcome.error is not None:
                print(escape_lines(f"error: iteration {outcome.iteration}: {outcome.error}"), file=sys.stderr)
            elif not as_json:
                print_outcome(outcome)
    raise typer.Exit(iterations.exit_code(outcomes))


def _write_json(data: dict[str, Any], shown: bool, file: Path | None, source: str) -> None:
    """Print it, and write it to a file that is as private as the source."""
    from ckpt_tools.cli.render import json_text, write_text

    text = json_text(data, 2)
    if file is not None:
        write_text(file, text + "\n", source)
    if shown:
        print(text)
