"""The commands by name, each imported and built when it is asked for: building all takes 35 ms of every start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup

from ckpt_tools.cli.help import write_epilog, write_parameters, write_sections
from ckpt_tools.cli.manual import PAGES

# The module that registers each command, in the order of the program's help.
MODULES = {
    "inspect": "inspect",
    "print-torch-dcp-in-json": "inspect",
    "convert": "convert",
    "convert-torch-dist-to-fsdp-dtensor": "convert",
    "convert-fsdp-dtensor-to-torch-dist": "convert",
    "build-param-group-map": "convert",
    "plan": "plan",
    "export-hf": "huggingface",
    "import-hf": "huggingface",
    "verify": "verify",
    "diff": "verify",
    "compare-two-checkpoint": "verify",
    "preflight": "verify",
    "modify-state-dict": "edit",
    "slice": "edit",
    "average": "average",
    "strip": "strip",
    "repair": "repair",
    "print-tensor": "edit",
    "env": "environment",
}


class Commands(Mapping[str, Any]):
    """Every command by its name, built now."""

    def __getitem__(self, name: str) -> Any:
        module = MODULES[name]
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        import_module(f"ckpt_tools.cli.{module}").register(app)
        app.registered_commands = [command for command in app.registered_commands if command.name == name]
        return typer.main.get_command(app)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


class Group(TyperGroup):
    """The group of all commands, which lists them under the sections of the manual."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"commands": Commands()})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter)
        pages = ((name, PAGES[name]) for name in self.commands)
        write_sections(((page.section, (name, page.summary)) for name, page in pages), formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_epilog(self.epilog, formatter)
