"""`env` and `--version`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckpt_tools.cli import render
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.signature import with_options
from ckpt_tools.human import human_bytes


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("env"))(with_options(env, {"as_json", "quiet"}))


def print_versions() -> None:
    """Version of the program and its libraries, one a line."""
    from ckpt_tools.commands.environment import library_versions

    for name, number in library_versions().items():
        print(name, number or "not installed")


def env(
    directory: Annotated[
        str | None, typer.Argument(help="Also say what the file system of this directory can do.")
    ] = None,
    **given: Any,
) -> None:
    """Show versions, machine and settings, for a bug report.

    No value of an environment variable that could be a secret is shown. The file system is tried with unnamed
    temporary files of 64 KiB.
    """
    from ckpt_tools.commands.environment import describe_environment

    found = describe_environment(directory)
    if given["as_json"]:
        print(render.json_text(found.as_json()))
        return
    rows = [(name, number or "not installed") for name, number in found.versions.items()]
    rows += [
        ("platform", found.platform),
        ("processors", str(found.processors)),
        ("memory", human_bytes(found.memory_bytes)),
        ("crc32", found.crc32),
        *found.variables.items(),
    ]
    if found.file_system is not None:
        disk = found.file_system
        copies = (
            "clones"
            if disk.shares_extents
            else "in the kernel"
            if disk.copies_in_kernel
            else "through memory"
        )
        rows += [
            ("directory", disk.directory),
            ("file system", disk.kind),
            ("free", human_bytes(disk.free_bytes)),
            ("writable", "yes" if disk.is_writable else "no"),
            ("copies", copies),
        ]
    render.print_table(("environment", ""), rows)
