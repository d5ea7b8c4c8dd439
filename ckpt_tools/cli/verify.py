"""`verify`, `diff` and its old name `compare-two-checkpoint`, and `preflight`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import findings, render
from ckpt_tools.cli import given_values as v
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options import flag, option
from ckpt_tools.cli.signature import Given, fill, with_options
from ckpt_tools.cli.table import EVERY_ITERATION, READING, Checkpoint
from ckpt_tools.model.choices import DialectName, DiffBy, NanPolicy, ReportFormat, assert_never

if TYPE_CHECKING:
    from ckpt_tools.commands.preflight import Start
    from ckpt_tools.verify.accounts import Audit
    from ckpt_tools.verify.differences import DiffReport, TensorDiff
    from ckpt_tools.verify.report import Report

_SHOWN = 20
_AS_JSON = flag("--json", help="JSON on stdout, the same as --format json.")
_VERIFY = {
    "content": flag("--content", help="Read every byte: checksums, masters against weights, NaN and Inf."),
    "manifest": option(
        Path, "--manifest",
        help="Compare with a file of SHA-256 sums that --write-manifest made; reads every byte.",
    ),
    "write_manifest": option(
        Path, "--write-manifest", callback=v.in_a_folder,
        help="Write SHA-256 sums of files and tensors to a new file, if the checkpoint is valid.",
    ),
    "allow_nonfinite": flag("--allow-nonfinite", help="NaN and Inf are warnings, not errors."),
    "against": option(
        str, "--against",
        help="What it was exported or imported from: count tensors, values and bytes of both, and name what one side "
             "alone has. Reads metadata only.",
    ),
    "rules": option(Path, "--rules", help="With --against: the rule file of the export or import."),
    "ignore_keys": option(
        list[str], "--ignore-keys", read=v.globs, help="With --against: keys that the export left out (glob)."
    ),
    "iteration": EVERY_ITERATION,
    "as_json": _AS_JSON,
}  # fmt: skip
_PREFLIGHT = {
    "yaml_file": option(Path, "--yaml", help="The job's settings: Bridge's or a Megatron-LM recipe."),
    "dialect": option(
        DialectName, "--target",
        help="Program that runs the job. Default: the one that the checkpoint was converted for, else main.",
    ),
    "as_json": _AS_JSON,
}  # fmt: skip
_DIFF = {
    "rules": option(
        Path, "--rules", help="The rule file of the export or import, for a Hugging Face model and a checkpoint."
    ),
    "rtol": option(float, "--rtol", default=0.0, min=0, help="Relative tolerance, of the larger value."),
    "atol": option(float, "--atol", default=0.0, min=0, help="Absolute tolerance."),
    "ulp": option(int, "--ulp", default=0, min=0, help="Representable numbers two values may be apart."),
    "nan": option(
        NanPolicy, "--nan",
        help="NaNs are equal by their bits (default), always (default with a tolerance), or never.",
    ),
    "keys": option(list[str], "--keys", read=v.globs, help="Compare only names that match (glob)."),
    "ignore": option(
        list[str], "--ignore", read=v.globs, help="Leave out names that match (glob), e.g. 'args.*'."
    ),
    "by": option(
        DiffBy, "--by", default="auto", help="Names: stored keys, those of fsdp_dtensor, or those of export-hf."
    ),
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    reported = READING | {"report_format", "junit"}
    compare = with_options(diff, READING | {"dialect", "as_json", "workers", "threads"}, _DIFF)
    old_name = page("compare-two-checkpoint") | {"help": "Compare two checkpoints: the old name of diff."}
    app.command(**page("verify"))(with_options(verify, reported | {"workers", "threads"}, _VERIFY))
    app.command(**page("diff"))(compare)
    app.command(**old_name)(compare)
    app.command(**page("preflight"))(with_options(preflight, reported, _PREFLIGHT))


def verify(
    checkpoints: Annotated[
        list[str],
        typer.Argument(metavar="CHECKPOINT...", help="Runs' roots, iteration folders, or torch DCP folders."),
    ],
    **given: Any,
) -> None:
    """Check that checkpoints are whole and sound. Exit code 1 when one is not, 4 when one is hostile.

    Exit code 3 when there is nothing to verify, as where a save was interrupted. Where a tracker names that, or
    where several are verified, it counts as one that is not whole.

    With --against the accounts of an export or import and its source must explain each other, too.
    """
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.verify import VerifyOptions, verify_checkpoint, verify_checkpoints

    of_all = given["iteration"] == "all"
    options, chosen = fill(VerifyOptions, given, every_iteration=of_all), _chosen(given)
    iteration = None if of_all else v.iteration_number(given["iteration"])
    if of_all:
        checkpoints = _every_iteration(checkpoints)
    is_one = len(checkpoints) == 1 and not of_all
    with progress_bar(given["quiet"]) as progress:
        if is_one:
            reports = [verify_checkpoint(checkpoints[0], iteration, options, progress)]
        else:
            reports = verify_checkpoints(checkpoints, iteration, options, progress)
    if is_one:
        _print_report(reports[0], "verify", chosen, given["junit"])
    else:
        _print_reports(reports, chosen, given["junit"])
    raise typer.Exit(
        max((4 if report.is_hostile else 0 if report.is_valid else 1 for report in reports), default=0)
    )


def _every_iteration(roots: Sequence[str]) -> list[str]:
    """The folders of all iterations, past what jobs are still writing."""
    from ckpt_tools.cli.reports import say_unfinished
    from ckpt_tools.commands.iterations import every_iteration

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
            help="After --: the job's command line, or only its flags.", metavar="[-- COMMAND...]"
        ),
    ] = None,
    **given: Any,
) -> None:
    """Check that a Megatron-FSDP job can load a checkpoint, and print its launch command. Exit code 1 when not."""
    from ckpt_tools.commands.preflight import preflight as check

    found = check(
        checkpoint, job or (), given["yaml_file"], given["iteration"], given["trust_pickle"], given["dialect"]
    )
    start = found.launch
    launch = None if start is None else {
        "environment": list(start.environment), "words": list(start.words), "command": start.command
    }  # fmt: skip
    chosen = _chosen(given)
    starts = [one.as_json() for one in found.starts]
    more = {"program": found.program, "launch": launch, "starts": starts}
    _print_report(found.report, "preflight", chosen, given["junit"], more)
    if chosen == "text":
        _print_starts(found.starts)
    if chosen == "text" and start is not None:
        render.tell(f"launch with ({found.program})")
        for line in (*start.environment, start.command):
            render.tell_command(f"  {render.escape_lines(line)}")
    raise typer.Exit(0 if found.report.is_valid else 1)


def _print_starts(starts: tuple[Start, ...]) -> None:
    """How every program starts from the checkpoint, those that do alike in one line."""
    alike: dict[str, list[str]] = {}
    for start in starts:
        how = start.how or f"does not start ({', '.join(start.broken)})"
        alike.setdefault(how, []).append(start.program)
    if alike:
        render.tell("started by")
    for how, programs in alike.items():
        render.tell(f"  {', '.join(programs)}: {how}")


def _chosen(given: Given) -> ReportFormat:
    chosen: ReportFormat = given["report_format"]
    return "json" if given["as_json"] else chosen


def diff(checkpoint_1: Checkpoint, checkpoint_2: Checkpoint, **given: Any) -> None:
    """Compare two checkpoints, also of different formats, bit by bit. Exit code 1 when they differ."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.diff import DiffRequest, diff_checkpoints
    from ckpt_tools.errors import UsageError
    from ckpt_tools.verify.differences import DiffOptions

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
        _print_diff(report)
    raise typer.Exit(0 if report.is_equal else 1)


def _print_report(
    report: Report, command: str, chosen: ReportFormat, junit: Path | None, more: dict[str, Any] | None = None
) -> None:
    if junit is not None:
        render.write_text(junit, findings.as_junit([report], command), report.checkpoint)
    match chosen:
        case "json":
            print(render.json_text(findings.as_json(report) | (more or {})))
        case "github":
            print(findings.as_github(report, command), end="")
        case "markdown":
            print(findings.as_markdown(report), end="")
        case "text":
            _print_text(report, command)
        case _:
            assert_never(chosen)


def _print_reports(reports: Sequence[Report], chosen: ReportFormat, junit: Path | None) -> None:
    """Several checkpoints' reports, one after the other; one document of JSON and of JUnit."""
    if junit is not None:
        render.write_text(junit, findings.as_junit(reports, "verify"), reports[0].checkpoint)
    if chosen == "json":
        whole = {"schema_version": findings.SCHEMA_VERSION, "valid": all(r.is_valid for r in reports)}
        print(render.json_text(whole | {"reports": [findings.as_json(report) for report in reports]}))
        return
    for report in reports:
        _print_report(report, "verify", chosen, None)


def _print_text(report: Report, command: str) -> None:
    good, bad = ("valid", "not valid") if command == "verify" else ("ready", "not ready")
    errors = sum(check.errors for check in report.checks)
    verdict = good if report.is_valid else f"{bad}: {errors} errors"
    last = f"{render.escape(report.checkpoint)} ({report.format}) is {verdict}{report.verdict_suffix}"
    if render.is_quiet():
        wrong = [finding for finding in report.findings if finding.severity == "error"]
        for line in (*findings.grouped(wrong), last) if wrong else ():
            render.complain(line)
        return
    if command == "verify":
        rows = [(c.name, c.looked_at, c.unit, c.errors, len(c.findings) - c.errors) for c in report.checks]
        render.print_table(("check", "looked at", "", "errors", "warnings"), rows)
    if report.audit is not None:
        _print_audit(report.audit)
    for line in findings.grouped(report.findings):
        render.tell(line)
    render.tell(last)


def _print_audit(audit: Audit) -> None:
    """What both sides hold, what was carried over, and what only one of them has."""
    rows: list[tuple[object, ...]] = []
    for name, side in (("source", audit.source), ("output", audit.output)):
        rows.append((f"{name} ({side.format})", *side.total))
        rows += [(f"  {dtype}", *amount) for dtype, amount in side.by_dtype.items()]
    render.print_table(("", "tensors", "values", "bytes"), rows, "accounts")
    carried = [
        (one.source_dtype, one.output_dtype, one.source.tensors, one.output.tensors, one.output.values)
        for one in audit.carried
    ]
    render.print_table(("carried over", "as", "tensors", "tensors made", "values"), carried)
    for where, alone in (("source", audit.only_in_source), ("output", audit.only_in_output)):
        rows = [(one.why, *one.amount, next(iter(one.names), "")) for one in alone]
        if rows:
            render.print_table((f"only in the {where}", "tensors", "values", "bytes", "the first"), rows)
    render.tell()


def _print_diff(report: DiffReport) -> None:
    from ckpt_tools.verify.differences import summarize

    columns = ("tensors", "compared", "equal", "different", "only in A", "only in B", "different elements",
               "largest |a-b|", "relative", "ULP")  # fmt: skip
    rows = [
        (s.role, s.tensors, s.equal, s.different, s.only_a, s.only_b, s.different_elements,
         f"{s.max_abs:.6g}", f"{s.max_rel:.6g}", s.max_ulp)
        for s in summarize(report.tensors)
    ]  # fmt: skip
    render.print_table(columns, rows)
    unequal = [tensor for tensor in report.tensors if tensor.kind != "equal"]
    unequal.sort(key=lambda tensor: (tensor.kind == "values", -tensor.found.max_abs))
    count = Counter(tensor.name for tensor in report.tensors)
    _print_tensors([replace(t, name=f"{t.name} ({t.role})") if count[t.name] > 1 else t for t in unequal])
    values = [f"{v.name}: {_side(v.a)} -> {_side(v.b)}" for v in report.values]
    for line in values[:_SHOWN]:
        render.tell(render.escape(line))
    if len(values) > _SHOWN:
        render.tell(f"... and {len(values) - _SHOWN:,} more values (--json lists all)")
    for note in report.notes:
        render.tell(f"note: {render.escape(note)}")
    entries = "entries of objects"  # `args.tp_size` is one of `args`
    verdict = (
        "equal" if report.is_equal else f"different: {len(unequal):,} tensors, {len(values):,} {entries}"
    )
    render.tell(
        f"compared {len(report.tensors):,} tensors and {report.values_compared:,} objects by {report.by}: {verdict}"
    )


def _print_tensors(unequal: list[TensorDiff]) -> None:
    """What cannot be compared in a line each, then the largest differences in columns."""
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
    from dataclasses import asdict

    from ckpt_tools.verify.differences import summarize

    return {
        "schema_version": findings.SCHEMA_VERSION,
        "a": report.a,
        "b": report.b,
        "by": report.by,
        "equal": report.is_equal,
        "tolerance": asdict(report.tolerance),
        "notes": list(report.notes),
        "objects_compared": report.values_compared,
        "summary": [
            {name: _number(value) for name, value in asdict(summary).items()}
            for summary in summarize(report.tensors)
        ],
    }


def _number(value: Any) -> Any:
    """`value`; infinity as text, because JSON has none."""
    return "inf" if value == float("inf") else value


def _diff_lists(report: DiffReport) -> dict[str, Any]:
    tensors = (
        {
            "key": t.name,
            "role": t.role,
            "kind": t.kind,
            "a": None if t.a is None else {"dtype": t.a[0], "shape": list(t.a[1])},
            "b": None if t.b is None else {"dtype": t.b[0], "shape": list(t.b[1])},
            "elements": t.elements,
            "different": t.found.different,
            "max_abs": _number(t.found.max_abs),
            "max_rel": _number(t.found.max_rel),
            "max_ulp": t.found.max_ulp,
            "nan_mismatches": t.found.nan_mismatches,
            "index": None if t.found.index is None else list(t.found.index),
            "values": None if t.found.values is None else [repr(value) for value in t.found.values],
        }
        for t in report.tensors
    )
    values = ({"key": v.name, "a": v.a, "b": v.b} for v in report.values)
    return {"tensors": tensors, "values": values}
