"""`--iteration all` of commands that write: each iteration of a run in turn, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import typer

from ckpt_tools.cli.options.given_values import iteration_number
from ckpt_tools.cli.options.signature import Given, fill
from ckpt_tools.cli.render import render

if TYPE_CHECKING:
    from ckpt_tools.commands.job.conversion import EditOptions, Progress
    from ckpt_tools.commands.job.iterations import Outcome
    from ckpt_tools.commands.job.report import ConversionReport

    Edit: TypeAlias = Callable[[EditOptions, Progress], ConversionReport]

Report = TypeVar("Report")


def edit(
    source: str,
    output: str,
    given: Given,
    run: Edit,
    data: Callable[[ConversionReport], dict[str, Any]],
    show: Callable[[ConversionReport], None],
) -> None:
    """Run a command that writes in the format of its source, on one iteration or all of them, and
    print its report.
    """
    from ckpt_tools.cli.render.progress import progress_bar
    from ckpt_tools.commands.job.conversion import EditOptions
    from ckpt_tools.commands.job.iterations import convert_iterations

    options = fill(EditOptions, given, iteration=None)
    with progress_bar(given["quiet"]) as progress:
        if given["iteration"] != "all":
            done = run(replace(options, iteration=iteration_number(given["iteration"])), progress)
            outcomes = None
        else:
            outcomes = convert_iterations(
                source,
                output,
                (),
                options.overwrite,
                lambda number, tracker: run(replace(options, iteration=number, tracker=tracker), progress),
            )
    if outcomes is None:
        finish(done, source, given, data, show)
    else:
        finish_all(outcomes, source, given, data, show, schema_version=1)


def finish(
    done: Report,
    source: str,
    given: Given,
    data: Callable[[Report], dict[str, Any]],
    show: Callable[[Report], None],
) -> None:
    """Print what was done on rank 0, and write it where `--report` says."""
    from ckpt_tools.cli.render.progress import is_first_rank

    if is_first_rank():
        render.give_json(data(done), given["as_json"], given["report"], source)
        if not given["as_json"]:
            show(done)


def finish_all(
    outcomes: list[Outcome[Report]],
    source: str,
    given: Given,
    data: Callable[[Report], dict[str, Any]],
    show: Callable[[Report], None],
    *,
    schema_version: int,
) -> None:
    """Print what became of every iteration on rank 0, and write it where `--report` says."""
    from ckpt_tools.cli.render.progress import is_first_rank
    from ckpt_tools.cli.render.reports import say_unfinished
    from ckpt_tools.commands.job import iterations

    if is_first_rank():
        whole = iterations.as_json(outcomes, data, schema_version)
        render.give_json(whole, given["as_json"], given["report"], source)
        for outcome in outcomes:
            if outcome.error is not None:
                render.complain(f"error: {outcome.name}: {outcome.error}")
            elif outcome.is_unfinished:
                say_unfinished(outcome.iteration)
            elif given["as_json"]:
                continue
            elif outcome.report is not None:
                show(outcome.report)
            else:
                render.tell(f"{outcome.name}: is there already, left as it is (--overwrite makes it anew)")
    raise typer.Exit(iterations.exit_code(outcomes))
