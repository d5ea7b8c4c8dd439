"""`convert` under the two names that NVIDIA's users know, each with its `--to` fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options import given_values as v
from ckpt_tools.cli.options.signature import with_options
from ckpt_tools.cli.verbs.convert import MEANING, OWN, InputDir, OutputDir, convert
from ckpt_tools.model.choices import Format, MegatronFormat


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command(**page("convert-torch-dist-to-fsdp-dtensor"))(_long_form("fsdp_dtensor", "torch_dist"))
    app.command(**page("convert-fsdp-dtensor-to-torch-dist"))(_long_form("torch_dist", "fsdp_dtensor"))


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
