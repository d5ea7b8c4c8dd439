"""`repair`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options.signature import fill, with_options
from ckpt_tools.cli.options.table import READING, REWRITING, OutputDir
from ckpt_tools.cli.render import render
from ckpt_tools.cli.render.reports import print_rewritten

if TYPE_CHECKING:
    from ckpt_tools.commands.edit.repair import Repaired

_SHOWN = 3


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    names = READING | REWRITING | {"resume", "dry_run", "workers", "threads"}
    app.command(**page("repair"))(with_options(repair, names))


def repair(
    input_dir: Annotated[str, typer.Argument(help="A run's root or an iteration folder; it stays as it is.")],
    output_dir: OutputDir,
    **given: Any,
) -> None:
    """Correct keys that an upstream program got wrong in fsdp_dtensor, where the checkpoint proves what is right.

    fp32 masters next to the weights, group fields under wrong names, layers under the numbers of a pipeline stage.
    No weight and no master is changed. Exit code 1 when no key is to be corrected; then no output is made.
    """
    from ckpt_tools.cli.render.progress import progress_bar
    from ckpt_tools.commands.edit.repair import RepairOptions, repair_checkpoint

    with progress_bar(given["quiet"]) as progress:
        done = repair_checkpoint(input_dir, output_dir, fill(RepairOptions, given), progress)
    render.print_report(lambda: _as_json(done), given["as_json"], lambda: _print(done))
    raise typer.Exit(0 if done.changes else 1)


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
        "left_out": done.left_out,
        "written": None if done.written is None else done.written.in_short(),
    }


def _print(done: Repaired) -> None:
    for change in done.changes:
        issue = f" ({change.issue})" if change.issue else ""
        render.tell(f"{change.cause}{issue}: {len(change.keys):,} entries")
        render.tell_first(change.keys, _SHOWN, "  ")
        render.tell(f"  proof: {change.proof}")
    if not done.changes:
        render.tell(
            f"{render.escape(done.source)}: repair knows no fault of these keys. Nothing was written. Values were "
            "not read: `verify --content` checks them"
        )
        return
    if done.written is None:
        render.tell("nothing was written (--dry-run)")
        return
    print_rewritten(done)
