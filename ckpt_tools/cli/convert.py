"""`convert`, its long names, and `build-param-group-map`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import options as o
from ckpt_tools.cli.inspect import EnableMsc, TrustPickle

if TYPE_CHECKING:
    from ckpt_tools.convert.outputs import ConversionReport

InputDir = Annotated[str, typer.Argument(help="A run's root or an iteration directory.")]
OutputDir = Annotated[
    str, typer.Argument(help="Like to like: a root for a root, else an iteration directory.")
]


class Format(str, Enum):
    FSDP_DTENSOR = "fsdp_dtensor"


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command("convert-torch-dist-to-fsdp-dtensor")(_long_form(Format.FSDP_DTENSOR, "torch_dist"))
    app.command("convert")(convert)
    app.command("build-param-group-map")(build_param_group_map)


def convert(
    input_dir: InputDir,
    output_dir: OutputDir,
    *,
    to: Annotated[Format, typer.Option("--to", help="Format of the output.")] = Format.FSDP_DTENSOR,
    swiglu: o.Swiglu = None,
    swiglu_modules: o.SwigluModules = "",
    group_map_file: o.GroupMapFile = None,
    strict_map: o.StrictMap = False,
    state_prefix: o.StatePrefix = None,
    model_prefix: o.ModelPrefix = "model.module",
    rename_mtp: o.RenameMtp = False,
    target: o.Target = None,
    layer_spec: o.LayerSpecOption = None,
    experts: o.ExpertsOption = None,
    weights_only: o.WeightsOnly = False,
    dtype: o.Dtype = None,
    vocab_size_padded: o.VocabSizePadded = None,
    vocab_size: o.VocabSize = None,
    layout: o.LayoutOption = None,
    world_size: o.WorldSize = None,
    dp_shard: o.DpShard = None,
    dp_outer: o.DpOuter = 1,
    tp: o.Tp = None,
    cp: o.Cp = 1,
    ep: o.Ep = 1,
    etp: o.Etp = None,
    strategy: o.Strategy = "optim_grads_params",
    outer_strategy: o.OuterStrategy = "no_shard",
    iteration: o.Iteration = None,
    check_masters: o.CheckMasters = o.Check.SAMPLE,
    ignore_keys: o.IgnoreKeys = None,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    dry_run: o.DryRun = False,
    threads: o.Threads = 2,
    max_memory: o.MaxMemory = "96MiB",
    fsync: o.Fsync = False,
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
    from ckpt_tools.convert.group_map import load_group_map
    from ckpt_tools.convert.to_fsdp_dtensor import ConvertOptions, convert_iterations
    from ckpt_tools.execute.run import WriteOptions
    from ckpt_tools.megatron.to_fsdp_dtensor import TargetOptions

    wanted = TargetOptions(
        dialect=target.value if target else None,
        layer_spec=layer_spec.value if layer_spec else None,
        experts=experts.value if experts else None,
        swiglu=swiglu,
        swiglu_modules=tuple(name for name in swiglu_modules.split(",") if name),
        rename_mtp=rename_mtp,
        tp=tp,
        weights_only=weights_only,
        dtype=dtype,
        vocab_size_padded=vocab_size_padded,
        vocab_size=vocab_size,
        group_map=load_group_map(group_map_file) if group_map_file else None,
        strict_map=strict_map,
        model_prefix=model_prefix,
        state_prefix=state_prefix,
    )
    sizes = (dp_shard, dp_outer, tp, cp, ep, etp, strategy, outer_strategy)
    chosen = ConvertOptions(
        target=wanted,
        layout=o.choose_layout(layout, world_size, *sizes),
        check_masters=check_masters.value,
        ignore_keys=tuple(ignore_keys or ()),
        trust_pickle=trust_pickle,
        overwrite=overwrite,
        resume=resume,
        write=WriteOptions(threads, o.parse_bytes(max_memory), fsync),
    )
    from ckpt_tools.cli.progress import progress_bar

    with progress_bar(quiet) as progress:
        reports = convert_iterations(input_dir, output_dir, iteration, chosen, progress, dry_run)
    finish(reports, as_json, report)


def _long_form(to: Format, source: str) -> Callable[..., None]:
    """`convert` with its `--to` fixed, under the name that NVIDIA's users know."""
    signature = inspect.signature(convert, eval_str=True)
    kept = [p for name, p in signature.parameters.items() if name != "to"]

    def command(*args: Any, **kwargs: Any) -> None:
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
        Path | None, typer.Option("-o", "--output", help="File to write. Default: stdout.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say on stderr which rule placed each parameter.")
    ] = False,
    target: o.Target = None,
    layer_spec: o.LayerSpecOption = None,
    experts: o.ExpertsOption = None,
    swiglu: o.Swiglu = None,
    iteration: Annotated[int | None, typer.Option(help="Iteration of a root, instead of its latest.")] = None,
) -> None:
    """Write a param_to_param_group_map.json: from a training job's dump, or derived from a checkpoint alone."""
    import json

    from ckpt_tools.cli.render import escape
    from ckpt_tools.convert.group_map import build_group_map
    from ckpt_tools.megatron.to_fsdp_dtensor import TargetOptions

    options = TargetOptions(
        dialect=target.value if target else None,
        layer_spec=layer_spec.value if layer_spec else None,
        experts=experts.value if experts else None,
        swiglu=swiglu,
    )
    found = build_group_map(source, options, iteration)
    text = json.dumps(dict(found.groups), indent=2)
    if output is None:
        print(text)
    else:
        output.write_text(text)
    if explain:
        for name, rule in found.rules.items():
            print(f"{escape(name)}: group {found.groups[name]} ({rule})", file=sys.stderr)


def finish(reports: list[ConversionReport], as_json: bool, file: Path | None) -> None:
    """Print the reports on rank 0; write them where asked."""
    import json

    from ckpt_tools.cli.progress import is_first_rank
    from ckpt_tools.cli.reports import print_report

    if not is_first_rank():
        return
    data: Any = [r.as_json() for r in reports]
    text = json.dumps(data if len(data) > 1 else data[0], indent=2, default=str)
    if file is not None:
        file.write_text(text + "\n")
    if as_json:
        print(text)
        return
    for report in reports:
        print_report(report)
