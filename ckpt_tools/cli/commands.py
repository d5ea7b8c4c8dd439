"""The commands by name, each imported and built when it is asked for: building all takes 35 ms of every start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup

from ckpt_tools.cli.help import fit_page, write_epilog, write_parameters, write_sections, write_usage
from ckpt_tools.cli.manual import PAGES
from ckpt_tools.cli.removed import REMOVED
from ckpt_tools.errors import Interrupted

# The module that registers each command, in the order of the program's help.
MODULES = {
    "inspect": "inspect",
    "print-torch-dcp-in-json": "inspect",
    "convert": "convert",
    "convert-torch-dist-to-fsdp-dtensor": "convert",
    "convert-fsdp-dtensor-to-torch-dist": "convert",
    "build-param-group-map": "group_map",
    "ls": "ls",
    "stats": "stats",
    "plan": "plan",
    "export-hf": "huggingface",
    "import-hf": "huggingface",
    "verify": "verify",
    "diff": "diff",
    "compare-two-checkpoint": "diff",
    "preflight": "verify",
    "modify-state-dict": "edit",
    "slice": "edit",
    "copy": "copy",
    "average": "average",
    "merge-adapter": "merge_adapter",
    "strip": "strip",
    "repair": "repair",
    "print-tensor": "edit",
}


# What people type, and the command that does it.
MEANT = {
    "info": "inspect", "show": "inspect", "keys": "inspect --keys GLOB", "tree": "inspect --tree", "list": "ls",
    "cat": "print-tensor", "dump": "print-torch-dcp-in-json", "check": "verify", "validate": "verify",
    "test": "verify", "fsck": "verify --content", "compare": "diff", "cmp": "diff", "cp": "copy", "sync": "copy",
    "upload": "copy", "download": "copy", "size": "inspect --by role",
    "usage": "inspect --by role", "norm": "stats", "norms": "stats",
    "nan": "stats", "export": "export-hf", "to-hf": "export-hf", "import": "import-hf", "from-hf": "import-hf",
    "reshard": "convert", "resize": "convert", "mean": "average", "merge": "average", "ema": "average",
    "rename": "modify-state-dict", "remove": "modify-state-dict", "cut": "slice",
    "shapes": "inspect", "dtypes": "inspect", "describe": "inspect", "head": "print-tensor", "get": "print-tensor",
    "launch": "preflight", "flags": "preflight", "ready": "preflight", "mv": "copy", "drop": "modify-state-dict",
    "delete": "modify-state-dict", "checksum": "verify --content", "sha256": "verify --write-manifest FILE",
    "version": "--version", "help": "--help",
}  # fmt: skip


class Commands(Mapping[str, Any]):
    """Every command by its name, built now."""

    def __getitem__(self, name: str) -> Any:
        module = MODULES[name]
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        import_module(f"ckpt_tools.cli.verbs.{module}").register(app)
        app.registered_commands = [command for command in app.registered_commands if command.name == name]
        return typer.main.get_command(app)

    def __contains__(self, name: object) -> bool:
        return name in MODULES  # `Mapping` would build the command to tell

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


@contextmanager
def _interrupts_told() -> Iterator[None]:
    """Around what typer would end without a word at Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing was published.") from None


class Group(TyperGroup):
    """The group of all commands, which lists them under the sections of the manual."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"commands": Commands()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        unknown = args[0] if args and args[0] not in self.commands else ""
        if unknown in REMOVED:
            ctx.fail(f"No such command '{unknown}'. {REMOVED[unknown]}")
        meant = MEANT.get(unknown)
        if meant is not None:
            ctx.fail(f"No such command '{args[0]}'. Try '{ctx.command_path} {meant}'.")
        found = super().resolve_command(ctx, args)
        from ckpt_tools.cli.render.progress import name_work

        name_work(found[0] or "")
        return found

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _interrupts_told():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with _interrupts_told():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_help(self, ctx: Any) -> str:
        fit_page(ctx)
        return super().get_help(ctx)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        write_usage(self, ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter)
        pages = ((name, PAGES[name]) for name in self.commands)
        write_sections(((page.section, (name, page.summary)) for name, page in pages), formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_epilog(self.epilog, formatter)
