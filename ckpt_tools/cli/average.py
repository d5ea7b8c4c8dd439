"""`average`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tools.cli import options as o
from ckpt_tools.cli import render
from ckpt_tools.cli.edit import AsJson
from ckpt_tools.cli.inspect import EnableMsc, TrustPickle
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.reports import source_checksums, written_json
from ckpt_tools.cli.verify import Iteration

if TYPE_CHECKING:
    from ckpt_tools.commands.average import Averaged

_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("average"))(average)


def average(
    input_dirs: Annotated[
        list[str], typer.Argument(help="Two or more checkpoints of one model, all of one kind.")
    ],
    output_dir: Annotated[str, typer.Argument(help="Like the last: a root for a root, else one folder.")],
    weights: Annotated[
        str | None, typer.Option("--weights", help="Shares in order, e.g. 0.5,0.3,0.2. Default: equal.")
    ] = None,
    ema: Annotated[
        float | None,
        typer.Option("--ema", help="Exponential moving average in order, with this decay, e.g. 0.9."),
    ] = None,
    iteration: Iteration = None,
    check_source: o.CheckSource = o.SourceCheck.ALL,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    threads: o.Threads = 2,
    max_memory: o.MaxMemory = "96MiB",
    as_json: AsJson = False,
    quiet: o.Quiet = False,
    trust_pickle: TrustPickle = False,
    enable_msc: EnableMsc = False,
) -> None:  # fmt: skip
    """Weighted mean of checkpoints: of masters where there are any, else of weights; all else is the last's."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.average import AverageOptions, average_checkpoints
    from ckpt_tools.execute.run import WriteOptions

    options = AverageOptions(
        weights=_shares(weights),
        ema=ema,
        iteration=iteration,
        trust_pickle=trust_pickle,
        overwrite=overwrite,
        resume=resume,
        write=WriteOptions(threads, o.parse_bytes(max_memory), check_source=check_source.value),
    )
    with progress_bar(quiet) as progress:
        done = average_checkpoints(input_dirs, output_dir, options, progress)
    print(render.json_text(_as_json(done))) if as_json else _print(done)


def _shares(text: str | None) -> tuple[float, ...] | None:
    """
    Raises:
        UsageError: not numbers with commas between them.
    """
    from ckpt_tools.errors import UsageError

    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise UsageError(f"--weights {text!r}: expected numbers like 0.5,0.3,0.2") from None


def _as_json(done: Averaged) -> dict[str, object]:
    return {
        "schema_version": 1,
        "sources": done.sources,
        "output": done.output,
        "kind": done.kind,
        "weights": done.weights,
        "tensor_count": done.tensors,
        "object_count": done.objects,
        "averaged": done.averaged,
        "rounded_from_masters": done.rounded,
        "not_averaged": done.kept,
        "masters_checked": done.masters_checked,
        "left_out": done.left_out,
        **written_json(done.written),
    }


def _print(done: Averaged) -> None:
    written = done.written
    for share, source in zip(done.weights, done.sources, strict=True):
        print(render.escape(f"{share:.6g} of {source}"))
    print(
        f"averaged {len(done.averaged):,} tensors; {len(done.rounded):,} weights are their masters' mean, rounded"
    )
    print(f"masters: {done.masters_checked}")
    for key in done.kept[:_SHOWN]:
        print(render.escape(f"not averaged, taken from the last: {key}"))
    if len(done.kept) > _SHOWN:
        print(f"... and {len(done.kept) - _SHOWN:,} more (--json lists all)")
    for line in done.left_out:
        print(render.escape(f"left out {line}"))
    print(
        f"wrote {done.tensors:,} tensors and {done.objects:,} objects, "
        f"{render.human_bytes(written.bytes_written)} in {written.seconds:.2f} s, to {render.escape(done.output)}"
    )
    print(f"source checksums: {source_checksums(written)}")
