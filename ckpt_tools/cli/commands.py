"""The commands by name, each imported and built when it is asked for: building all takes 35 ms of every start."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from ckpt_tools.cli.completion import offer_values
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
    "print-tensor": "edit",
    "env": "environment",
    "man": "man_pages",
}


class Commands(Mapping[str, Any]):
    """Every command by its name, built now."""

    def __getitem__(self, name: str) -> Any:
        module = MODULES[name]
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        import_module(f"ckpt_tools.cli.{module}").register(app)
        app.registered_commands = [command for command in app.registered_commands if command.name == name]
        (command,) = app.registered_commands
        command.callback = _with_follow_links(command.callback)
        return offer_values(typer.main.get_command(app))

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


FollowLinks = Annotated[
    bool,
    typer.Option(
        "--follow-links", help="Read a checkpoint's files also through links that lead out of its folder."
    ),
]


def _with_follow_links(command: Any) -> Any:
    """The function of a command, with one more option if it reads checkpoints. The option is about the process."""
    signature = inspect.signature(command, eval_str=True)
    if "enable_msc" not in signature.parameters:
        return command

    def reading(*args: Any, follow_links: bool, **options: Any) -> None:
        from ckpt_tools.formats import files

        files.follow_links(follow_links)
        command(*args, **options)

    one = inspect.Parameter(
        "follow_links", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=FollowLinks
    )
    parameters = [*signature.parameters.values(), one]
    reading.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    reading.__annotations__ = {p.name: p.annotation for p in parameters}
    reading.__doc__ = command.__doc__
    return reading


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
