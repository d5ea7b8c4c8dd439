"""`merge-adapter`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options.signature import fill, with_options
from ckpt_tools.cli.options.table import READING, RUNNING
from ckpt_tools.cli.verbs.convert import carry_out


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    names = RUNNING | READING | {"ignore_keys", "alpha"}
    app.command(**page("merge-adapter"))(with_options(merge, names))


def merge(
    input_dirs: Annotated[
        list[str], typer.Argument(help="Base and adapter; or one checkpoint that holds both (wrapped).")
    ],
    output_dir: Annotated[str, typer.Argument(help="Like the base: a root for a root, else one folder.")],
    **given: Any,
) -> None:
    """Merge a low-rank adapter (LoRA) into its base: W + alpha / rank * B A, rounded once.

    A Megatron adapter (Megatron-Bridge, NeMo 2) goes into a torch_dist or fsdp_dtensor checkpoint, into the fp32
    masters where there are any. The output has weights only, in the format of the base. DoRA and other variants are
    refused by name. import-hf --adapter merges a PEFT directory.
    """
    from ckpt_tools.commands.adapters.merge_adapter import MergeOptions, merge_adapter
    from ckpt_tools.errors import UsageError

    if len(input_dirs) > 2:
        raise UsageError(
            f"a base, its adapter and the output are three folders; {len(input_dirs) + 1} are given"
        )
    base, adapter = input_dirs[0], input_dirs[1] if len(input_dirs) > 1 else None
    options = fill(MergeOptions, given, adapter=adapter)
    carry_out(
        lambda progress: merge_adapter(base, adapter, output_dir, options, progress, given["dry_run"]), given
    )
