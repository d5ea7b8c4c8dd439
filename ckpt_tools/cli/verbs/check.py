"""`verify` and `preflight`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import findings, render
from ckpt_tools.cli import options as v
from ckpt_tools.cli.options import flag, option
from ckpt_tools.cli.table import EVERY_ITERATION, READING, Checkpoint, Given, fill, with_options
from ckpt_tools.human import counted
from ckpt_tools.model.choices import DialectName, ReportFormat, assert_never
from ckpt_tools.plain_data import plain

if TYPE_CHECKING:
    from ckpt_tools.commands.check.launch import Launch
    from ckpt_tools.commands.check.preflight import Start
    from ckpt_tools.verify.report import Report

_AS_JSON = flag("--json", help="Print JSON, the same as --format json.")
_VERBOSE = flag("--verbose", "-v", help="Print every check, and how much it looked at.")
_WAYS = {"resume": "resumes training"}
_VERIFY = {
    "content": flag("--content", help="Read every byte: checksums, NaN and Inf, masters equal to weights."),
    "manifest": option(
        Path, "--manifest",
        help="Compare with the SHA-256 sums in a file of --write-manifest; reads every byte.",
    ),
    "write_manifest": option(
        Path, "--write-manifest", callback=v.in_a_folder,
        help="Write SHA-256 sums of files and tensors to a file, if the checkpoint is valid.",
    ),
    "allow_nonfinite": flag("--allow-nonfinite", help="NaN and Inf are warnings, not errors."),
    "iteration": EVERY_ITERATION,
    "verbose": _VERBOSE,
    "as_json": _AS_JSON,
}  # fmt: skip
_PREFLIGHT = {
    "yaml_file": option(Path, "--yaml", help="File with the job's settings: Megatron-Bridge's, or a recipe."),
    "dialect": option(
        DialectName, "--target",
        help="Megatron version that runs the job. Default: the one that the checkpoint was converted for, else main.",
    ),
    "verbose": _VERBOSE,
    "as_json": _AS_JSON,
}  # fmt: skip


def verify(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT...", help="Runs, iterations, PyTorch DCP folders, or Hugging Face models."
        ),
    ],
    **given: Any,
) -> None:
    """Check that checkpoints are intact. Exit code 0: valid, 1: not valid, 4: hostile, 3: there is no checkpoint.

    Without --content only metadata and file sizes are read, and every pickle: nothing in it is executed.
    """
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.check.verify import VerifyOptions, verify_checkpoint, verify_checkpoints

    of_all = given["iteration"] == "all"
    options = fill(VerifyOptions, given, every_iteration=of_all)
    if of_all:
        checkpoints = _every_iteration(checkpoints)
    iteration = None if of_all else given["iteration"]
    is_one = len(checkpoints) == 1 and not of_all
    with progress_bar(given["quiet"]) as progress:
        if is_one:
            reports = [verify_checkpoint(checkpoints[0], iteration, options, progress)]
        else:
            reports = verify_checkpoints(checkpoints, iteration, options, progress)
    _write_junit(reports, "verify", given)
    if _chosen(given) == "json" and not is_one:
        whole = {"schema_version": findings.SCHEMA_VERSION, "valid": all(r.is_valid for r in reports)}
        print(render.json_text(whole | {"reports": [findings.as_json(report) for report in reports]}))
    else:
        for report in reports:
            _print_report(report, "verify", given)
    raise typer.Exit(
        max((4 if report.is_hostile else 0 if report.is_valid else 1 for report in reports), default=0)
    )


def _every_iteration(roots: Sequence[str]) -> list[str]:
    """The folders of all iterations, without those that jobs are still writing."""
    from ckpt_tools.cli.reports import say_unfinished
    from ckpt_tools.commands.job.iterations import every_iteration

    folders = []
    for root in roots:
        whole, unfinished = every_iteration(root)
        folders += whole
        for number in unfinished:
            say_unfinished(number)
    return folders


def preflight(
    checkpoint: Checkpoint,
    job: Annotated[
        list[str] | None,
        typer.Argument(
            help="After --: the command line of the job, or only its flags.", metavar="[-- COMMAND...]"
        ),
    ] = None,
    **given: Any,
) -> None:
    """Check that a training job can load a checkpoint, and print the launch command. Exit code 1: it cannot.

    With a command line after --, check that one.
    """
    from ckpt_tools.commands.check.preflight import preflight as check

    found = check(
        checkpoint, job or (), given["yaml_file"], given["iteration"], given["trust_pickle"], given["dialect"]
    )
    _write_junit([found.report], "preflight", given)
    more = {
        "program": found.program,
        "launch": found.launch and plain(found.launch) | {"command": found.launch.command},
        "as_is": found.as_is and plain(found.as_is) | {"command": found.as_is.command},
        "starts": plain(found.starts),
    }
    _print_report(found.report, "preflight", given, more)
    if _chosen(given) == "text":
        _print_starts(found.starts)
        _print_launch(f"launch with ({found.program})", found.launch)
        _print_launch(
            f"a 3D-parallel job loads it without conversion: launch with ({found.program})",
            found.as_is,
        )
    raise typer.Exit(0 if found.report.is_valid else 1)


def _print_launch(title: str, start: Launch | None) -> None:
    if start is not None:
        render.tell(title)
        for line in (*start.environment, start.command):
            render.tell_command(f"  {render.escape_lines(line)}")


def _print_starts(starts: tuple[Start, ...]) -> None:
    """How each loader starts from the checkpoint, those that do the same in one line."""
    by_way: dict[str, list[str]] = {}
    for start in starts:
        way = _WAYS.get(start.how or "", start.how) or f"cannot load it ({', '.join(start.broken)})"
        by_way.setdefault(way, []).append(start.program)
    if by_way:
        render.tell("can be loaded by")
    for way, programs in by_way.items():
        render.tell(f"  {', '.join(programs)}: {way}")


def _chosen(given: Given) -> ReportFormat:
    chosen: ReportFormat = given["report_format"]
    return "json" if given["as_json"] else chosen


def _write_junit(reports: Sequence[Report], command: str, given: Given) -> None:
    if given["junit"] is not None:
        render.write_text(given["junit"], findings.as_junit(reports, command), reports[0].checkpoint)


def _print_report(report: Report, command: str, given: Given, more: dict[str, Any] | None = None) -> None:
    chosen = _chosen(given)
    match chosen:
        case "json":
            print(render.json_text(findings.as_json(report) | (more or {})))
        case "github":
            print(findings.as_github(report, command), end="")
        case "markdown":
            print(findings.as_markdown(report), end="")
        case "text":
            _print_text(report, command, given["verbose"])
        case _:
            assert_never(chosen)


def _print_text(report: Report, command: str, verbose: bool) -> None:
    """The verdict, then findings with what to do, then each check if `verbose`."""
    good, bad = ("valid", "not valid") if command == "verify" else ("ready", "not ready")
    errors = sum(check.errors for check in report.checks)
    answer = good if report.is_valid else f"{bad}: {counted(errors, 'error')}"
    verdict = f"{render.escape(report.checkpoint)} ({report.format}) is {answer}{report.verdict_suffix}"
    if render.is_quiet():
        wrong = [finding for finding in report.findings if finding.severity == "error"]
        for line in (verdict, *findings.grouped(wrong)) if wrong else ():
            render.complain(line)
        return
    render.tell_verdict(verdict, report.is_valid)
    for line in findings.grouped(report.findings):
        render.tell(line)
    if verbose:
        rows = [(c.name, c.looked_at, c.unit, c.errors, len(c.findings) - c.errors) for c in report.checks]
        render.print_table(("check", "looked at", "", "errors", "warnings"), rows)


_REPORTED = READING | {"report_format", "junit"}
COMMANDS = {
    "verify": with_options(verify, _REPORTED | {"workers", "threads"}, _VERIFY),
    "preflight": with_options(preflight, _REPORTED, _PREFLIGHT),
}
