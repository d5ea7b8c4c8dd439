"""The commands by name, each imported and built when it is asked for: building all takes 35 ms of every start.

And how `--help` is laid out: commands and options in named sections, and epilogs that keep their lines.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from ckpt_tools.cli.manual import OTHER_NAMES, PAGES, examples
from ckpt_tools.cli.render import NARROWEST, fold_cell, fold_command, fold_line
from ckpt_tools.errors import Interrupted
from ckpt_tools.human import counted

# The module of each command, in the order of the program's help.
MODULES = {
    "ls": "look",
    "inspect": "look",
    "print-tensor": "look",
    "stats": "look",
    "print-torch-dcp-in-json": "look",
    "verify": "check",
    "diff": "check",
    "convert": "convert",
    "preflight": "check",
    "plan": "convert",
    "export-hf": "convert",
    "import-hf": "convert",
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
    "compare-two-checkpoint": "check",
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


Row = tuple[str, str]
_MOST = 16  # options of a page that leaves none out; one is --help
_EXAMPLES = 2  # that --help shows
_NARROW = 64  # columns of a page in which a definition is below its term
OLD_SPELLING = re.compile(r", --trust-pickle\b")  # accepted, and no longer shown
_LIMITS = re.compile(
    r"\s*\[(?:\d+<=)?x<=?\d+\]|; (?:\d+<=)?x<=?\d+(?=\])|(?<=\[)x>=\d+; |\s*\[x>=\d+\]|; x>=\d+(?=\])"
)


class Command(TyperCommand):
    """A command with its options in panels; `--help` shows the everyday ones and two examples, `--help-all` all."""

    shows_all = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--help-all" in args and "--" not in args:
            self.shows_all = True
            print(self.get_help(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        fit_page(ctx)
        return super().get_help(ctx)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        write_usage(self, ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = parameters(self, ctx)
        options = sum(panel != "Arguments" for panel, _ in rows)
        if not self.shows_all and options > _MOST:
            everyday = self.callback.everyday  # type: ignore[union-attr]
            rows = parameters(self, ctx, everyday | {"help"})
        write_sections(rows, formatter)
        if hidden := options - sum(panel != "Arguments" for panel, _ in rows):
            formatter.write(f"\n--help-all shows {hidden} more options.\n")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        most = None if self.shows_all else _EXAMPLES
        write_epilog(examples(self.name or "", most), formatter)
        if most is not None and (more := len(PAGES[self.name or ""].examples) - most) > 0:
            formatter.write(f"--help-all shows {counted(more, 'more example')}.\n")


def fit_page(ctx: Any) -> None:
    """Give a page the columns that the terminal has; click never goes below 50."""
    columns = max(shutil.get_terminal_size().columns, NARROWEST)
    ctx.terminal_width = min(columns, ctx.max_content_width or 80) - 2


def write_usage(command: Any, ctx: Any, formatter: Any) -> None:
    """The first line of a page."""
    pieces = (piece.strip("{}") for piece in command.collect_usage_pieces(ctx))  # Typer 0.28: {INPUT_DIR}
    usage = " ".join(("Usage:", ctx.command_path, *pieces))
    formatter.write("\n".join(fold_line(usage, formatter.width)) + "\n")


def parameters(command: Any, ctx: Any, options: Set[str] | None = None) -> list[tuple[str, Row]]:
    """The command's arguments and options, or those of these names, as its pages show them, each with its panel."""
    rows = []
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        is_argument = param.param_type_name == "argument"
        default = "Arguments" if is_argument else "Options"
        if record is not None and (options is None or is_argument or param.name in options):
            term, text = (OLD_SPELLING.sub("", record[0]), _LIMITS.sub("", record[1]))
            row = (term.replace("<int range>", "<int>").replace("<float range>", "<float>"), text)
            rows.append((getattr(param, "rich_help_panel", None) or default, row))
    return rows


def write_sections(rows: Iterable[tuple[str, Row]], formatter: Any) -> None:
    """Definition lists, one a section."""
    for section, found in by_section(rows).items():
        with formatter.section(section):
            _write_rows(found, formatter)


def by_section(rows: Iterable[tuple[str, Row]]) -> dict[str, list[Row]]:
    """The rows of each section, in the order in which the sections first appear."""
    sections: dict[str, list[Row]] = {}
    for section, row in rows:
        sections.setdefault(section, []).append(row)
    return sections


def _write_rows(rows: list[Row], formatter: Any) -> None:
    """A definition list, in two columns if there is room for them."""
    if formatter.width >= _NARROW:
        formatter.write_dl(rows)
        return
    for term, text in rows:
        for indent, part in ((2, term), (6, " ".join(text.split()))):
            lines = fold_cell(part, formatter.width - indent)
            formatter.write("".join(f"{' ' * indent}{line}\n" for line in lines))


def write_epilog(epilog: str | None, formatter: Any) -> None:
    """The end of a page, with its lines kept; the lines with the largest indent are commands."""
    if epilog:
        folded = [
            part
            for line in epilog.split("\n")
            for part in (fold_command if line.startswith("    ") else fold_line)(line, formatter.width)
        ]
        formatter.write("\n" + "\n".join(folded) + "\n")
