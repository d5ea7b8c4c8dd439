"""How `--help` is laid out: commands and options in named sections, and epilogs that keep their lines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Set
from typing import Any

from typer.core import TyperCommand

from ckpt_tools.cli.manual import PAGES, examples
from ckpt_tools.cli.render import NARROWEST, fold_cell, fold_command, fold_line
from ckpt_tools.human import counted

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


def _write_rows(rows: list[Row], formatter: Any) -> None:
    """A definition list, in two columns if there is room for them."""
    if formatter.width >= _NARROW:
        formatter.write_dl(rows)
        return
    for term, text in rows:
        for indent, part in ((2, term), (6, " ".join(text.split()))):
            lines = fold_cell(part, formatter.width - indent)
            formatter.write("".join(f"{' ' * indent}{line}\n" for line in lines))


def by_section(rows: Iterable[tuple[str, Row]]) -> dict[str, list[Row]]:
    """The rows of each section, in the order in which the sections first appear."""
    sections: dict[str, list[Row]] = {}
    for section, row in rows:
        sections.setdefault(section, []).append(row)
    return sections


def write_epilog(epilog: str | None, formatter: Any) -> None:
    """The end of a page, with its lines kept; the lines with the largest indent are commands."""
    if epilog:
        folded = [
            part
            for line in epilog.split("\n")
            for part in (fold_command if line.startswith("    ") else fold_line)(line, formatter.width)
        ]
        formatter.write("\n" + "\n".join(folded) + "\n")
