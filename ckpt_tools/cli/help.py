"""How `--help` is laid out: commands and options in named sections, and epilogs that keep their lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

Row = tuple[str, str]


class Command(TyperCommand):
    """A command whose options stand under the panels they were given."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_epilog(self.epilog, formatter)


def write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    """The command's arguments and options, under their panels."""
    write_sections(parameters(command, ctx), formatter)


def parameters(command: Any, ctx: Any) -> list[tuple[str, Row]]:
    """The command's arguments and options as its pages show them, each with its panel."""
    rows = []
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        default = "Arguments" if param.param_type_name == "argument" else "Options"
        if record is not None:
            rows.append((getattr(param, "rich_help_panel", None) or default, record))
    return rows


def write_sections(rows: Iterable[tuple[str, Row]], formatter: Any) -> None:
    """Definition lists, one a section."""
    for section, found in by_section(rows).items():
        with formatter.section(section):
            formatter.write_dl(found)


def by_section(rows: Iterable[tuple[str, Row]]) -> dict[str, list[Row]]:
    """The rows of each section, in the order in which the sections first appear."""
    sections: dict[str, list[Row]] = {}
    for section, row in rows:
        sections.setdefault(section, []).append(row)
    return sections


def write_epilog(epilog: str | None, formatter: Any) -> None:
    """The end of a page, line by line as it is."""
    if epilog:
        formatter.write(f"\n{epilog}\n")
