"""`verify`, `preflight`, and `diff` with its old name `compare-two-checkpoint`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import findings, render
from ckpt_tools.cli import options as v
from ckpt_tools.cli.options import flag, option
from ckpt_tools.cli.table import EVERY_ITERATION, READING, Checkpoint, Given, fill, with_options
from ckpt_tools.human import counted
from ckpt_tools.model.choices import DialectName, DiffBy, NanPolicy, ReportFormat, assert_never
from ckpt_tools.plain_data import plain

if TYPE_CHECKING:
    from ckpt_tools.commands.check.launch import Launch
    from ckpt_tools.commands.check.preflight import Start
    from ckpt_tools.verify.compare.differences import DiffReport, TensorDiff
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
    from ckpt_tools.commands.check.verify import verify_checkpoint, verify_checkpoints
    from ckpt_tools.verify.report import VerifyOptions

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


_SHOWN = 20
_DIFF = {
    "rules": option(
        Path, "--rules", help="Rule file of the export or import, if one side is a Hugging Face model."
    ),
    "rtol": option(float, "--rtol", default=0.0, min=0, help="Relative tolerance, of the larger value."),
    "atol": option(float, "--atol", default=0.0, min=0, help="Absolute tolerance."),
    "ulp": option(int, "--ulp", default=0, min=0, help="Representable numbers that two values may be apart."),
    "nan": option(
        NanPolicy, "--nan",
        help="NaNs are equal by their bits (default), always (default with a tolerance), or never.",
    ),
    "keys": option(list[str], "--keys", read=v.globs, help="Compare only names that match this glob."),
    "ignore": option(
        list[str], "--ignore", read=v.globs, help="Leave out names that match this glob, e.g. 'args.*'."
    ),
    "headers": flag(
        "--headers",
        help="Compare names, shapes and types only; no values are read.",
    ),
    "verbose": flag("--verbose", "-v", help="Print the table of roles even if all is equal."),
    "by": option(
        DiffBy, "--by", default="auto", help="Names to match: stored keys, those of fsdp_dtensor or of export-hf."
    ),
}  # fmt: skip


def diff(checkpoint_1: Checkpoint, checkpoint_2: Checkpoint, **given: Any) -> None:
    """Compare two checkpoints bit by bit, also of different formats. Exit code 1: they differ."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.check.diff import DiffRequest, diff_checkpoints
    from ckpt_tools.errors import UsageError
    from ckpt_tools.verify.compare.differences import DiffOptions

    if given["iteration"] is not None and checkpoint_1.rstrip("/") == checkpoint_2.rstrip("/"):
        raise UsageError(
            f"--iteration {given['iteration']}: both sides are that of {checkpoint_1}; "
            "two of its iterations are compared as `diff RUN/iter_0000002 RUN/iter_0000004`"
        )
    if given["nan"] is None:
        given["nan"] = "equal" if given["rtol"] or given["atol"] or given["ulp"] else "bits"
    request = fill(DiffRequest, given, iterations=(given["iteration"],) * 2)
    with progress_bar(given["quiet"]) as progress:
        report = diff_checkpoints(checkpoint_1, checkpoint_2, fill(DiffOptions, given), request, progress)
    if given["as_json"]:
        sys.stdout.writelines(render.json_lines(_diff_head(report), _diff_lists(report)))
    else:
        _print_diff(report, given["verbose"])
    raise typer.Exit(0 if report.is_equal else 1)


def _print_diff(report: DiffReport, verbose: bool) -> None:
    """The verdict, then what differs, then the table of roles: if something differs or `verbose`."""
    from ckpt_tools.verify.compare.differences import summarize

    unequal = [tensor for tensor in report.tensors if tensor.kind != "equal"]
    values = [f"{v.name}: {_side(v.a)} -> {_side(v.b)}" for v in report.values]
    # `args.tp_size` is an entry of the object `args`
    counts = ", ".join(
        f"{n:,} {what}" for n, what in ((len(unequal), "tensors"), (len(values), "entries of objects")) if n
    )
    tensors = f"{len(report.tensors):,} tensors"
    what = (
        f"the headers of {tensors}" if report.headers else f"{tensors} and {report.values_compared:,} objects"
    )
    verdict = "equal" if report.is_equal else f"different: {counts}"
    elements, accepted = report.accepted
    if elements:
        verdict += (
            f", {'but' if report.is_equal else 'and'} {elements:,} elements of {accepted:,} stored weights are not "
            "their masters rounded to even, and the other side has the masters alone"
        )
    render.tell_verdict(f"{verdict} (compared {what} by {report.by})", report.is_equal)
    unequal.sort(key=lambda tensor: (tensor.kind == "values", -tensor.found.max_abs))
    count = Counter(tensor.name for tensor in report.tensors)
    _print_tensors([replace(t, name=f"{t.name} ({t.role})") if count[t.name] > 1 else t for t in unequal])
    render.tell_first(values, _SHOWN, what="more values")
    for note in report.notes:
        render.tell(f"note: {render.escape(note)}")
    if unequal or verbose:
        columns = ("tensors", "compared", "equal", "different", "only in A", "only in B", "different elements",
                   "largest |a-b|", "relative", "ULP")  # fmt: skip
        rows = [
            (s.role, s.tensors, s.equal, s.different, s.only_a, s.only_b, s.different_elements,
             f"{s.max_abs:.6g}", f"{s.max_rel:.6g}", s.max_ulp)
            for s in summarize(report.tensors)
        ]  # fmt: skip
        render.print_table(columns, rows)


def _print_tensors(unequal: list[TensorDiff]) -> None:
    """A line for each tensor that cannot be compared, then the largest differences in columns."""
    shown = unequal[:_SHOWN]
    for tensor in shown:
        if tensor.kind != "values":
            render.tell(render.escape(_tensor_line(tensor)))
    rows = [_tensor_row(tensor) for tensor in shown if tensor.kind == "values"]
    if rows:
        render.print_table(("tensor", "different", "of", "most at", "A", "B", "NaN"), rows)
    if len(unequal) > len(shown):
        render.tell(f"... and {len(unequal) - len(shown):,} more tensors (--json lists all)")


def _tensor_row(tensor: TensorDiff) -> list[object]:
    found = tensor.found
    at = "-" if found.index is None else f"[{', '.join(map(str, found.index))}]"
    a, b = ("-", "-") if found.values is None else two_values(*found.values)
    return [tensor.name, found.different, tensor.elements, at, a, b, found.nan_mismatches]


def two_values(a: Any, b: Any) -> tuple[str, str]:
    """Two values that differ with six digits, or with as many as show that they do."""
    for digits in (6, 9, 17):
        if not isinstance(a, float) or not isinstance(b, float):
            break
        texts = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return repr(a), repr(b)


def _side(value: str | None) -> str:
    return "(absent)" if value is None else value


def _tensor_line(tensor: TensorDiff) -> str:
    found = tensor.found
    if tensor.kind.startswith("only"):
        dtype, shape = tensor.a or tensor.b or ("", ())
        return f"{tensor.name}: {tensor.kind} ({dtype} {list(shape)})"
    forms = [form for form in (tensor.a, tensor.b) if form is not None]
    ends = " -> ".join(f"{dtype} {list(shape)}" for dtype, shape in forms)
    return f"{tensor.name}: {ends}" + (f", {found.different:,} values differ" if tensor.elements else "")


def _diff_head(report: DiffReport) -> dict[str, Any]:
    from ckpt_tools.verify.compare.differences import summarize

    return {
        "schema_version": findings.SCHEMA_VERSION,
        "a": report.a,
        "b": report.b,
        "by": report.by,
        "equal": report.is_equal,
        "accepted": report.accepted[0],
        "headers": report.headers,
        "tolerance": plain(report.tolerance),
        "notes": plain(report.notes),
        "objects_compared": report.values_compared,
        "summary": [plain(summary) for summary in summarize(report.tensors)],
    }


def _diff_lists(report: DiffReport) -> dict[str, Any]:
    def form(side: tuple[str, tuple[int, ...]] | None) -> dict[str, Any] | None:
        return None if side is None else {"dtype": side[0], "shape": side[1]}

    tensors = (
        {
            "key": t.name,
            "role": t.role,
            "kind": t.kind,
            "a": form(t.a),
            "b": form(t.b),
            "elements": t.elements,
            **plain(t.found),
            "values": None if t.found.values is None else [repr(value) for value in t.found.values],
        }
        for t in report.tensors
    )
    return {"tensors": tensors, "values": (plain(v, {"name": "key"}) for v in report.values)}


_OPTIONS = READING | {"dialect", "as_json", "workers", "threads"}


COMMANDS = {
    "verify": with_options(verify, _REPORTED | {"workers", "threads"}, _VERIFY),
    "preflight": with_options(preflight, _REPORTED, _PREFLIGHT),
    "diff": with_options(diff, _OPTIONS, _DIFF),
    "compare-two-checkpoint": with_options(diff, _OPTIONS, _DIFF),
}
COMMANDS["compare-two-checkpoint"].__doc__ = "Compare two checkpoints: the old name of diff."
