"""The commands by name, each imported and built when it is asked for: building all takes 35 ms of every start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import typer
import typer.main
from typer.core import TyperGroup

from ckpt_tools.cli.help import Command, fit_page, parameters, write_epilog, write_sections, write_usage
from ckpt_tools.cli.manual import OTHER_NAMES, PAGES
from ckpt_tools.errors import Interrupted

# The module of each command, in the order of the program's help.
MODULES = {
    "ls": "look",
    "inspect": "look",
    "print-tensor": "look",
    "stats": "stats",
    "print-torch-dcp-in-json": "look",
    "verify": "check",
    "diff": "diff",
    "convert": "convert",
    "preflight": "check",
    "plan": "plan",
    "export-hf": "huggingface",
    "import-hf": "huggingface",
    "build-param-group-map": "convert",
    "strip": "edit",
    "average": "edit",
    "slice": "edit",
    "merge-adapter": "edit",
    "modify-state-dict": "edit",
    "repair": "edit",
    "copy": "edit",
    "convert-torch-dist-to-fsdp-dtensor": "convert",
    "convert-fsdp-dtensor-to-torch-dist": "convert",
    "compare-two-checkpoint": "diff",
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
    "version": "--version",
}  # fmt: skip

# Commands and options of former releases, and what to use now.
REMOVED: Final[dict[str, str]] = {
    "convert --aliases": "Convert once for each program: --target.",
    "convert-torch-dist-to-fsdp-dtensor --aliases": "Convert once for each program: --target.",
    **dict.fromkeys(
        ("convert --like-source", "convert-fsdp-dtensor-to-torch-dist --like-source"),
        "Megatron does not load masters that are stored as remainders; fp32 masters load with the right loss.",
    ),
    **dict.fromkeys(
        ("convert --keep-states", "convert-torch-dist-to-fsdp-dtensor --keep-states", "plan --keep-states"),
        "No job loads such states; keep the source for the way back.",
    ),
    "verify --against": "Use `diff A B --headers`.",
    "repair --trust-masters": "repair corrects keys of fsdp_dtensor and changes no weights.",
    **dict.fromkeys(
        ("plan --disk", "plan --network", "plan --nodes"),
        "Times of other machines are no longer predicted; a conversion takes about the time of cp -r.",
    ),
    "watch": "Run 'convert RUN OUT --iteration all' again, from a timer or a loop: it converts what is new.",
    "du": "inspect CKPT --by role (layer, rank, dtype, file) shows where bytes are, ls RUN sizes of iterations.",
    "env": "Use 'checkpoint-inspector --version --verbose'.",
    "man": "Use --help of each command; 'checkpoint-inspector --for-agents' prints the text for assistants.",
}


def removed_option(error: object) -> str:
    """The sentence on the option that click does not know, or nothing."""
    command = getattr(getattr(error, "ctx", None), "info_name", None)
    sentence = REMOVED.get(f"{command} {getattr(error, 'option_name', None)}")
    return f" {sentence}" if sentence else ""


class Commands(Mapping[str, Any]):
    """Every command by its name, built now."""

    def __getitem__(self, name: str) -> Any:
        function = import_module(f"ckpt_tools.cli.verbs.{MODULES[name]}").COMMANDS[name]
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        page = PAGES[name]
        app.command(name=name, cls=Command, short_help=page.summary, rich_help_panel=page.section)(function)
        return typer.main.get_command(app)

    def __contains__(self, name: object) -> bool:
        return name in MODULES  # `Mapping` would build the command

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


@contextmanager
def _interrupts_reported() -> Iterator[None]:
    """Report Ctrl-C, at which typer would end without a message."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing was published.") from None


class Group(TyperGroup):
    """The group of all commands, which lists them under the sections of the manual."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"commands": Commands()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == "help":
            if not args[1:]:
                print(ctx.get_help())
                ctx.exit()
            args = [*args[1:], "--help"]
        unknown = args[0] if args[0] not in self.commands else ""
        if unknown in REMOVED:
            ctx.fail(f"No such command '{unknown}'. {REMOVED[unknown]}")
        meant = MEANT.get(unknown)
        if meant is not None:
            ctx.fail(f"No such command '{args[0]}'. Try '{ctx.command_path} {meant}'.")
        found = super().resolve_command(ctx, args)
        from ckpt_tools.cli.progress import name_work

        name_work(found[0] or "")
        return found

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _interrupts_reported():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with _interrupts_reported():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_help(self, ctx: Any) -> str:
        fit_page(ctx)
        return super().get_help(ctx)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        write_usage(self, ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_sections(parameters(self, ctx), formatter)
        pages = ((name, PAGES[name]) for name in self.commands)
        write_sections(
            ((page.section, (name, page.summary)) for name, page in pages if page.section != OTHER_NAMES),
            formatter,
        )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_epilog(self.epilog, formatter)
