"""`verify`, `diff` and its old name `compare-two-checkpoint`, and `preflight`."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import findings, render
from ckpt_tools.cli import options as o
from ckpt_tools.cli.inspect import EnableMsc, TrustPickle
from ckpt_tools.cli.manual import page

if TYPE_CHECKING:
    from ckpt_tools.commands.preflight import Start
    from ckpt_tools.verify.differences import DiffReport, TensorDiff
    from ckpt_tools.verify.report import Report

_SHOWN = 20
Checkpoint = Annotated[
    str, typer.Argument(help="A run's root, an iteration folder, or any torch DCP folder.")
]
Iteration = Annotated[int | None, typer.Option(help="Iteration of a root, instead of its latest.")]


class ReportFormat(str, Enum):
    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    MARKDOWN = "markdown"


class Nan(str, Enum):
    BITS = "bits"
    EQUAL = "equal"
    DIFFERENT = "different"


class By(str, Enum):
    AUTO = "auto"
    KEYS = "keys"
    PARAMETERS = "parameters"
    HUGGINGFACE = "huggingface"


FormatOption = Annotated[
    ReportFormat, typer.Option("--format", help="text, json, github (annotations) or markdown.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, the same as --format json.")]
Junit = Annotated[
    Path | None,
    typer.Option("--junit", callback=o.in_a_folder, help="Also write the report there as JUnit XML."),
]


JobTarget = Annotated[
    o.Dialect | None,
    typer.Option(
        "--target",
        help="Program that runs the job. Default: the one that the checkpoint was converted for, else main.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command(**page("verify"))(verify)
    app.command(**page("diff"))(diff)
    app.command(**page("compare-two-checkpoint"), help="Compare two checkpoints: the old name of diff.")(diff)
    app.command(**page("preflight"))(preflight)


def verify(
    checkpoint: Checkpoint,
    content: Annotated[
        bool,
        typer.Option("--content", help="Read every byte: checksums, masters against weights, NaN and Inf."),
    ] = False,
    manifest: Annotated[
        Path | None,
        typer.Option(
            help="Compare with a file of SHA-256 sums that --write-manifest made; reads every byte."
        ),
    ] = None,
    write_manifest: Annotated[
        Path | None,
        typer.Option(
            callback=o.in_a_folder,
            help="Write SHA-256 sums of files and tensors to a new file, if the checkpoint is valid.",
        ),
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="NaN and Inf are warnings, not errors.")
    ] = False,
    iteration: Iteration = None,
    report_format: FormatOption = ReportFormat.TEXT,
    as_json: AsJson = False,
    junit: Junit = None,
    threads: o.Threads = 2,
    quiet: o.Quiet = False,
    trust_pickle: TrustPickle = False,
    enable_msc: EnableMsc = False,
) -> None:
    """Check that a checkpoint is whole and sound. Exit code 1 when it is not, 4 when it is hostile."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.verify import VerifyOptions, verify_checkpoint

    options = VerifyOptions(content, manifest, allow_nonfinite, trust_pickle, threads, write_manifest)
    with progress_bar(quiet) as progress:
        report = verify_checkpoint(checkpoint, iteration, options, progress)
    _print_report(report, "verify", ReportFormat.JSON if as_json else report_format, junit)
    raise typer.Exit(4 if report.is_hostile else 0 if report.is_valid else 1)


def preflight(
    checkpoint: Checkpoint,
    job: Annotated[
        list[str] | None,
        typer.Argument(
            help="After --: the job's command line, or only its flags.", metavar="[-- COMMAND...]"
        ),
    ] = None,
    yaml_file: Annotated[
        Path | None, typer.Option("--yaml", help="The job's settings: Bridge's or a Megatron-LM recipe.")
    ] = None,
    target: JobTarget = None,
    iteration: Iteration = None,
    report_format: FormatOption = ReportFormat.TEXT,
    as_json: AsJson = False,
    junit: Junit = None,
    trust_pickle: TrustPickle = False,
    enable_msc: EnableMsc = False,
) -> None:
    """Check that a Megatron-FSDP job can load a checkpoint, and print its launch command. Exit code 1 when not."""
    from ckpt_tools.commands.preflight import preflight as check

    found = check(checkpoint, job or (), yaml_file, iteration, trust_pickle, target.value if target else None)
    start = found.launch
    launch = None if start is None else {
        "environment": list(start.environment), "words": list(start.words), "command": start.command
    }  # fmt: skip
    chosen = ReportFormat.JSON if as_json else report_format
    starts = [one.as_json() for one in found.starts]
    more = {"program": found.program, "launch": launch, "starts": starts}
    _print_report(found.report, "preflight", chosen, junit, more)
    if chosen is ReportFormat.TEXT:
        _print_starts(found.starts)
    if chosen is ReportFormat.TEXT and start is not None:
        print(f"launch with ({found.program})")
        for line in (*start.environment, start.command):
            print(f"  {render.escape_lines(line)}")
    raise typer.Exit(0 if found.report.is_valid else 1)


def _print_starts(starts: tuple[Start, ...]) -> None:
    """How every program starts from the checkpoint, those that do alike in one line."""
    alike: dict[str, list[str]] = {}
    for start in starts:
        how = start.how or f"does not start ({', '.join(start.broken)})"
        alike.setdefault(how, []).append(start.program)
    if alike:
        print("started by")
    for how, programs in alike.items():
        print(f"  {', '.join(programs)}: {how}")


def diff(
    checkpoint_1: Checkpoint,
    checkpoint_2: Checkpoint,
    rtol: Annotated[float, typer.Option(min=0, help="Relative tolerance, of the larger value.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Absolute tolerance.")] = 0.0,
    ulp: Annotated[int, typer.Option(min=0, help="Representable numbers two values may be apart.")] = 0,
    nan: Annotated[
        Nan | None,
        typer.Option(
            help="NaNs are equal by their bits (default), always (default with a tolerance), or never."
        ),
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--keys", help="Compare only names that match (glob).")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", help="Leave out names that match (glob), e.g. 'args.*'.")
    ] = None,
    by: Annotated[
        By, typer.Option("--by", help="Names: stored keys, those of fsdp_dtensor, or those of export-hf.")
    ] = By.AUTO,
    target: o.Target = None,
    iteration: Iteration = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    threads: o.Threads = 2,
    quiet: o.Quiet = False,
    enable_msc: EnableMsc = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Compare two checkpoints, also of different formats, bit by bit. Exit code 1 when they differ."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.diff import DiffRequest, diff_checkpoints
    from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions
    from ckpt_tools.verify.compare import Tolerance
    from ckpt_tools.verify.differences import DiffOptions

    policy = nan.value if nan else "equal" if rtol or atol or ulp else "bits"
    options = DiffOptions(Tolerance(rtol, atol, ulp, policy), tuple(keys or ()), tuple(ignore or ()), threads)
    dialect = TargetOptions(dialect=target.value if target else None)
    request = DiffRequest(by.value, (iteration, iteration), dialect, trust_pickle)
    with progress_bar(quiet) as progress:
        report = diff_checkpoints(checkpoint_1, checkpoint_2, options, request, progress)
    if as_json:
        sys.stdout.writelines(render.json_lines(_diff_head(report), _diff_lists(report)))
    else:
        _print_diff(report)
    raise typer.Exit(0 if report.is_equal else 1)


def _print_report(
    report: Report, command: str, chosen: ReportFormat, junit: Path | None, more: dict[str, Any] | None = None
) -> None:
    if junit is not None:
        render.write_text(junit, findings.as_junit(report, command), report.checkpoint)
    if chosen is ReportFormat.JSON:
        print(render.json_text(findings.as_json(report) | (more or {})))
    elif chosen is ReportFormat.GITHUB:
        print(findings.as_github(report, command), end="")
    elif chosen is ReportFormat.MARKDOWN:
        print(findings.as_markdown(report), end="")
    else:
        _print_text(report, command)


def _print_text(report: Report, command: str) -> None:
    good, bad = ("valid", "not valid") if command == "verify" else ("ready", "not ready")
    if command == "verify":
        rows = [(c.name, c.looked_at, c.unit, c.errors, len(c.findings) - c.errors) for c in report.checks]
        render.print_table(("check", "looked at", "", "errors", "warnings"), rows)
    for finding in report.findings:
        print(findings.plain(finding))
    errors = sum(check.errors for check in report.checks)
    verdict = good if report.is_valid else f"{bad}: {errors} errors"
    print(f"{render.escape(report.checkpoint)} ({report.format}) is {verdict}{report.verdict_suffix}")


def _print_diff(report: DiffReport) -> None:
    from ckpt_tools.verify.differences import summarize

    columns = ("tensors", "compared", "equal", "different", "only in A", "only in B", "different elements",
               "largest |a-b|", "relative", "ULP")  # fmt: skip
    rows = [
        (s.role, s.tensors, s.equal, s.different, s.only_a, s.only_b, s.different_elements,
         f"{s.max_abs:.3g}", f"{s.max_rel:.3g}", s.max_ulp)
        for s in summarize(report.tensors)
    ]  # fmt: skip
    render.print_table(columns, rows)
    unequal = [tensor for tensor in report.tensors if tensor.kind != "equal"]
    unequal.sort(key=lambda tensor: (tensor.kind == "values", -tensor.found.max_abs))
    lines = [_tensor_line(tensor) for tensor in unequal]
    values = [f"{v.name}: {_side(v.a)} -> {_side(v.b)}" for v in report.values]
    for what, found in (("tensors", lines), ("values", values)):
        for line in found[:_SHOWN]:
            print(render.escape(line))
        if len(found) > _SHOWN:
            print(f"... and {len(found) - _SHOWN:,} more {what} (--json lists all)")
    for note in report.notes:
        print(f"note: {render.escape(note)}")
    verdict = "equal" if report.is_equal else f"different: {len(unequal):,} tensors, {len(values):,} values"
    print(
        f"compared {len(report.tensors):,} tensors and {report.values_compared:,} objects by {report.by}: {verdict}"
    )


def _side(value: str | None) -> str:
    return "(absent)" if value is None else value


def _tensor_line(tensor: TensorDiff) -> str:
    found = tensor.found
    if tensor.kind.startswith("only"):
        dtype, shape = tensor.a or tensor.b or ("", ())
        return f"{tensor.name}: {tensor.kind} ({dtype} {list(shape)})"
    if tensor.a and tensor.b and tensor.a != tensor.b:
        ends = " -> ".join(f"{dtype} {list(shape)}" for dtype, shape in (tensor.a, tensor.b))
        return f"{tensor.name}: {ends}" + (f", {found.different:,} values differ" if tensor.elements else "")
    text = f"{tensor.name}: {found.different:,} of {tensor.elements:,} elements"
    if found.index is not None and found.values is not None:
        at = ", ".join(map(str, found.index))
        text += f", most at [{at}]: {found.values[0]!r} -> {found.values[1]!r}"
    return text + (f", {found.nan_mismatches:,} with NaN" if found.nan_mismatches else "")


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
