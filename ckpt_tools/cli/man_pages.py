"""`man`: the manual as man pages, made from the same commands, options and examples as `--help`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt_tools import __version__
from ckpt_tools.cli import render
from ckpt_tools.cli.help import by_section, parameters
from ckpt_tools.cli.manual import EXIT_CODES, PAGES, PLACEHOLDERS, PROGRAM, command_line, page

FOR_AGENTS = Path(__file__).parent.parent / "for-agents.md"


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("man"))(man)


def man(
    context: typer.Context,
    command: Annotated[
        str | None, typer.Argument(help="Print the page of this command. Default: of the program.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write all pages into this folder, which is made if need be."),
    ] = None,
    for_agents: Annotated[
        bool,
        typer.Option("--for-agents", help="Print what an automated assistant needs to know (Markdown)."),
    ] = False,
) -> None:
    """Print a man page (roff, for `| man -l -`), or write all of them."""
    from ckpt_tools.errors import UsageError

    if for_agents:
        if command or output:
            raise UsageError("--for-agents is a document of its own; leave out COMMAND and --output")
        sys.stdout.write(FOR_AGENTS.read_text())
        return
    group = context.parent.command if context.parent else context.command
    names = (None, *PAGES) if output else (command,)
    if output and command:
        raise UsageError("--output writes the pages of all commands; leave out COMMAND")
    if command is not None and command not in PAGES:
        raise UsageError(f"there is no command {command!r}; `{PROGRAM} --help` lists them")
    for name in names:
        text = man_page(group, context, name)
        if output is None:
            sys.stdout.write(text)
            if sys.stdout.isatty():
                words = " ".join(filter(None, (PROGRAM, "man", command)))
                render.tell(
                    f"note: a man page in its source form; to read it: `{words} | man -l -`", sys.stderr
                )
        else:
            try:
                output.mkdir(parents=True, exist_ok=True)
                (output / f"{'-'.join(filter(None, (PROGRAM, name)))}.1").write_text(text)
            except OSError as error:
                raise UsageError(f"--output {output}: {error.strerror or error}") from error
    if output is not None:
        render.tell(f"wrote {len(names)} pages into {render.escape(str(output))}", sys.stderr)


def man_page(group: Any, context: Any, name: str | None) -> str:
    """The page of a command, or of the whole program, as roff."""
    command = group if name is None else group.get_command(context, name)
    title = "-".join(filter(None, (PROGRAM, name)))
    summary = PAGES[name].summary if name else "inspect, convert and verify Megatron checkpoints"
    lines = [f'.TH "{_roff(title.upper())}" 1 "" "ckpt_tools {__version__}" "User Commands"']
    lines += [".SH NAME", f"{_roff(title)} \\- {_roff(summary)}", ".SH SYNOPSIS"]
    usage = filter(None, (name, *command.collect_usage_pieces(context)))
    lines += [f".B {_roff(PROGRAM)}", _roff(" ".join(usage))]
    lines += [".SH DESCRIPTION", *_paragraphs(command.help)]
    lines += _options(command, context)
    lines += _examples(name) if name else _commands()
    lines += [".SH EXIT STATUS"]
    lines += [line for code, meaning in EXIT_CODES.items() for line in _entry(str(code), meaning)]
    others = "each command has a page" if name is None else f"{PROGRAM}(1)"
    return "\n".join([*lines, ".SH SEE ALSO", _roff(others), ""])


def _options(command: Any, context: Any) -> list[str]:
    """Arguments and options, each under the section that `--help` puts it into."""
    lines = []
    for title, rows in by_section(parameters(command, context)).items():
        lines += [f".SH {_roff(title.upper())}", *(line for row in rows for line in _entry(*row))]
    return lines


def _commands() -> list[str]:
    rows = [line for name, found in PAGES.items() for line in _entry(name, found.summary)]
    return [".SH COMMANDS", *rows]


def _examples(name: str) -> list[str]:
    """The examples as they are typed, and what the capitals in them stand for."""
    shown = PAGES[name].examples
    lines = [".SH EXAMPLES"]
    for what, words in shown:
        typed = [_roff(line) for line in command_line(words).splitlines()]
        lines += [".PP", _roff(f"{what}:"), ".PP", ".nf", ".RS 4", *typed, ".RE", ".fi"]
    used = " ".join(words for _, words in shown)
    for placeholder, what in PLACEHOLDERS.items():
        if placeholder in used:
            lines += _entry(placeholder, what)
    return lines


def _entry(term: str, text: str) -> list[str]:
    return [".TP", f"\\fB{_roff(term)}\\fR", _roff(" ".join(text.split()))]


def _paragraphs(text: str | None) -> list[str]:
    parts = [" ".join(part.split()) for part in (text or "").split("\n\n")]
    return [line for part in parts if part for line in (".PP", _roff(part))]


def _roff(text: str) -> str:
    """Text in which nothing is a request or an escape."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return f"\\&{text}" if text.startswith(".") else text
