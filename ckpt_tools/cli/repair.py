"""`repair`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tools.cli import options as o
from ckpt_tools.cli import render
from ckpt_tools.cli.edit import AsJson, OutputDir
from ckpt_tools.cli.inspect import EnableMsc, TrustPickle
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.reports import source_checksums, written_json
from ckpt_tools.cli.verify import Iteration

if TYPE_CHECKING:
    from ckpt_tools.commands.repair import Repaired

_SHOWN = 3


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("repair"))(repair)


def repair(
    input_dir: Annotated[str, typer.Argument(help="A run's root or an iteration folder; it stays as it is.")],
    output_dir: OutputDir,
    trust_masters: Annotated[
        bool,
        typer.Option(
            "--trust-masters",
            help="Take weights from their masters also where nothing shows which of the two is wrong.",
        ),
    ] = False,
    dry_run: o.DryRun = False,
    iteration: Iteration = None,
    check_source: o.CheckSource = o.SourceCheck.ALL,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    threads: o.Threads = 2,
    as_json: AsJson = False,
    quiet: o.Quiet = False,
    trust_pickle: TrustPickle = False,
    enable_msc: EnableMsc = False,
) -> None:
    """Write a sound copy of a checkpoint that an upstream program damaged, where the checkpoint proves what is right.

    fp32 masters beside the weights of fsdp_dtensor, group fields under wrong names, layers under the numbers of a
    pipeline stage; weights of torch_dist that are not numbers or have wrong checksums, from their masters.
    """
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.repair import RepairOptions, repair_checkpoint
    from ckpt_tools.execute.run import WriteOptions

    write = WriteOptions(threads, check_source=check_source.value)
    options = RepairOptions(iteration, trust_pickle, overwrite, write, resume, trust_masters, dry_run)
    with progress_bar(quiet) as progress:
        done = repair_checkpoint(input_dir, output_dir, options, progress)
    print(render.json_text(_as_json(done))) if as_json else _print(done)


def _as_json(done: Repaired) -> dict[str, object]:
    return {
        "schema_version": 1,
        "source": done.source,
        "output": done.output,
        "format": done.format,
        "changes": [
            {"cause": c.cause, "issue": c.issue, "proof": c.proof, "where": c.keys} for c in done.changes
        ],
        "tensor_count": done.tensors,
        "object_count": done.objects,
        "written": None if done.written is None else written_json(done.written),
    }


def _print(done: Repaired) -> None:
    for change in done.changes:
        issue = f" ({change.issue})" if change.issue else ""
        print(f"{change.cause}{issue}: {len(change.keys):,} entries")
        for key in change.keys[:_SHOWN]:
            print(f"  {render.escape(key)}")
        if len(change.keys) > _SHOWN:
            print(f"  ... and {len(change.keys) - _SHOWN:,} more")
        print(f"  proof: {change.proof}")
    written = done.written
    if written is None:
        print("nothing was written (--dry-run)")
        return
    print(
        f"wrote {done.tensors:,} tensors and {done.objects:,} objects, "
        f"{render.human_bytes(written.bytes_written)} in {written.seconds:.2f} s, to {render.escape(done.output)}"
    )
    print(f"source checksums: {source_checksums(written)}")
