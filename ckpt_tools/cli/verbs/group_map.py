"""`build-param-group-map`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options import given_values as v
from ckpt_tools.cli.options import table as t
from ckpt_tools.cli.options.row import flag, option
from ckpt_tools.cli.options.signature import fill, with_options

_MAP = {
    "output": option(
        Path, "-o", "--output", callback=v.in_a_folder, help="File to write. Default: stdout."
    ),
    "explain": flag("--explain", help="Say on stderr which rule placed each parameter."),
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("build-param-group-map"))(
        with_options(
            build_param_group_map,
            t.OPENING | {"dialect", "layer_spec", "experts", "swiglu", "iteration"},
            _MAP,
        )
    )


def build_param_group_map(
    source: Annotated[
        str, typer.Argument(help="A map dump, or a torch_dist checkpoint to derive the map from.")
    ],
    **given: Any,
) -> None:
    """Write a param_to_param_group_map.json: from a training job's dump, or derived from a checkpoint alone."""
    from ckpt_tools.cli.render.render import escape, json_text, tell, write_text
    from ckpt_tools.commands.convert.group_map import build_group_map
    from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions

    found = build_group_map(source, fill(TargetOptions, given), given["iteration"])
    write_text(given["output"] or Path("-"), json_text(dict(found.groups), 2) + "\n", source)
    if given["explain"]:
        for name, rule in found.rules.items():
            tell(f"{escape(name)}: group {found.groups[name]} ({rule})", sys.stderr)
