"""`strip`."""

from __future__ import annotations

from dataclasses import replace
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
    from ckpt_tools.commands.strip import Stripped


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("strip"))(strip)


def strip(
    input_dir: Annotated[str, typer.Argument(help="A run's root or an iteration folder.")],
    output_dir: OutputDir,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="Element type of the weights, which fsdp_dtensor stores as fp32 masters."
        ),
    ] = None,
    fresh_optimizer: Annotated[
        bool,
        typer.Option(
            "--fresh-optimizer",
            help="Give an fsdp_dtensor checkpoint an optimizer that has not begun (zero "
            "moments, step 0), so that a strict load starts from its weights.",
        ),
    ] = False,
    lr: o.Lr = None,
    min_lr: o.MinLr = None,
    weight_decay: o.WeightDecay = None,
    adam_beta1: o.AdamBeta1 = None,
    adam_beta2: o.AdamBeta2 = None,
    adam_eps: o.AdamEps = None,
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
    """Copy the weights of a checkpoint: without optimizer, scheduler and random number states."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.rewrite import EditOptions
    from ckpt_tools.commands.strip import strip_checkpoint
    from ckpt_tools.execute.run import WriteOptions
    from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import check_fresh
    from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions

    settings = TargetOptions(
        lr=lr,
        min_lr=min_lr,
        weight_decay=weight_decay,
        adam_beta1=adam_beta1,
        adam_beta2=adam_beta2,
        adam_eps=adam_eps,
    )
    check_fresh(replace(settings, fresh_optimizer=fresh_optimizer, weights_only=True))
    write = WriteOptions(threads, check_source=check_source.value)
    options = EditOptions(iteration, trust_pickle, overwrite, write, resume)
    with progress_bar(quiet) as progress:
        done = strip_checkpoint(
            input_dir, output_dir, dtype, options, progress, settings if fresh_optimizer else None
        )
    print(render.json_text(_as_json(done))) if as_json else _print(done)


def _as_json(done: Stripped) -> dict[str, object]:
    written = done.written
    return {
        "schema_version": 1,
        "source": done.source,
        "output": done.output,
        "tensor_count": done.tensors,
        "object_count": done.objects,
        "removed": done.removed,
        "dtype": done.dtype,
        "cast": done.cast,
        "left_out": done.left_out,
        "notes": done.notes,
        "rounded_elements": written.rounded_elements,
        **written_json(written),
    }


def _print(done: Stripped) -> None:
    written = done.written
    if done.removed or not done.notes:
        print(
            f"left out {len(done.removed):,} keys and entries of optimizer, scheduler and random number states"
        )
    if done.cast:
        print(
            f"cast {len(done.cast):,} tensors to {done.dtype}, which rounded {written.rounded_elements:,} elements"
        )
    print(
        f"wrote {done.tensors:,} tensors and {done.objects:,} objects, "
        f"{render.human_bytes(written.bytes_written)} in {written.seconds:.2f} s, to {render.escape(done.output)}"
    )
    for line in done.left_out:
        print(render.escape(f"left out {line}"))
    for note in done.notes:
        print(f"note: {render.escape(note)}")
    print(f"source checksums: {source_checksums(written)}")
