"""Run a command that writes a checkpoint, of one iteration or of all of a run, and print its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from ckpt_tools.cli import render
from ckpt_tools.cli.table import AnyOptions, Given

if TYPE_CHECKING:
    from ckpt_tools.commands.job.conversion import Progress
    from ckpt_tools.model.choices import CheckpointKind

Report = TypeVar("Report")


def carry_out(
    source: str,
    output: str,
    given: Given,
    options: AnyOptions,
    run: Callable[[AnyOptions, Progress], Report],
    data: Callable[[Report], dict[str, Any]] | None = None,
    show: Callable[[Report, bool], None] | None = None,
    *,
    kinds: tuple[CheckpointKind, ...] = (),
    schema_version: int = 1,
) -> Report:
    """Run a command on one iteration, or on all if `--iteration all` is given, and print what it did on rank 0.

    Args:
        options: of the library. `run` gets them with the iteration, and whether the output's tracker is to name it.
        data: the report as JSON's types. `show` prints it for people: the whole of it with --verbose. Both default
            to those of a conversion.
        kinds: those of the output that count as there already; empty for the source's own.
        schema_version: of one report, which that of all iterations has too.
    """
    from ckpt_tools.cli.progress import is_first_rank, progress_bar
    from ckpt_tools.cli.reports import print_report, say_unfinished
    from ckpt_tools.commands.job import iterations
    from ckpt_tools.commands.job.report import ConversionReport

    in_json: Callable[[Any], dict[str, Any]] = data or ConversionReport.as_json
    in_text: Callable[[Any, bool], None] = show or print_report

    def run_one(number: int | None, tracker: bool) -> Report:
        changes: dict[str, Any] = {"tracker": tracker} if hasattr(options, "tracker") else {}
        return run(replace(options, iteration=number, **changes), progress)  # type: ignore[type-var]

    number, as_json, file = given["iteration"], given["as_json"], given.get("report")
    with progress_bar(given["quiet"]) as progress:
        if number != "all":
            done = run_one(number, True)
            outcomes = [iterations.Outcome(number, done)]
        else:
            outcomes = iterations.convert_iterations(source, output, kinds, given["overwrite"], run_one)
    if is_first_rank():
        if as_json or file is not None:
            found = (
                in_json(done) if number != "all" else iterations.as_json(outcomes, in_json, schema_version)
            )
            text = render.json_text(found, 2) + "\n"
            if file is not None:
                render.write_text(file, text, source)
            if as_json:
                print(text, end="")
        for outcome in outcomes:
            if outcome.error is not None:
                render.complain(f"error: {outcome.name}: {outcome.error}")
            elif outcome.is_unfinished:
                say_unfinished(outcome.iteration)
            elif as_json:
                continue
            elif outcome.report is not None:
                in_text(outcome.report, given["verbose"])
            else:
                render.tell(f"{outcome.name}: exists already, skipped (--overwrite replaces it)")
    if number == "all":
        raise typer.Exit(iterations.exit_code(outcomes))
    return done
