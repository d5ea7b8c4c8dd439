"""A report of checks in the forms that people, CI services and programs read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tools.cli.render import escape, escape_lines
from ckpt_tools.human import counted

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from ckpt_tools.verify.report import Finding, Report

SCHEMA_VERSION = 1
_NUMBERS = re.compile(r"\d+")
_ALIKE = 3  # findings of one kind, shown
_IN_CODE = str.maketrans({"`": r"\x60", "|": r"\x7c", "<": r"\x3c"})


def as_json(report: Report) -> dict[str, Any]:
    """The report in JSON's types."""
    read = {} if report.content_read is None else {"content_read": report.content_read}
    return {
        "schema_version": SCHEMA_VERSION,
        "checkpoint": report.checkpoint,
        "format": report.format,
        "valid": report.is_valid,
        **read,
        "checks": [
            {
                "name": check.name,
                "unit": check.unit,
                "looked_at": check.looked_at,
                "errors": check.errors,
                "findings": [
                    {"severity": f.severity, "where": f.where, "message": f.message}
                    | ({"fix": f.fix} if f.fix else {})
                    for f in check.findings
                ],
            }
            | ({"source": check.source} if check.source else {})
            for check in report.checks
        ],
    }


def as_junit(reports: Sequence[Report], command: str) -> str:
    """JUnit's XML: a suite a report, a test case a check, failed when it has errors."""
    from xml.etree import ElementTree as Xml

    suites = Xml.Element("testsuites", _counts(reports))
    for report in reports:
        suite = Xml.SubElement(
            suites, "testsuite", {"name": escape_lines(report.checkpoint), **_counts([report])}
        )
        _add_cases(suite, report, command)
    Xml.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(suites, encoding="unicode") + "\n"


def _counts(reports: Sequence[Report]) -> dict[str, str]:
    checks = [check for report in reports for check in report.checks]
    failed = sum(check.errors > 0 for check in checks)
    return {"tests": str(len(checks)), "failures": str(failed), "errors": "0", "skipped": "0"}


def _add_cases(suite: Element, report: Report, command: str) -> None:
    from xml.etree import ElementTree as Xml

    for check in report.checks:
        case = Xml.SubElement(suite, "testcase", {"classname": f"ckpt_tools.{command}", "name": check.name})
        lines = [plain(finding) for finding in check.findings]
        if check.errors:
            failure = Xml.SubElement(case, "failure", {"message": counted(check.errors, "error")})
            failure.text = "\n".join(lines)
        elif lines:
            Xml.SubElement(case, "system-out").text = "\n".join(lines)


def as_github(report: Report, command: str) -> str:
    """Workflow commands of GitHub Actions: an annotation a finding."""

    def title(check: str) -> str:
        return _data(f"{command} {check}").replace(":", "%3A").replace(",", "%2C")

    lines = [
        f"::{f.severity} title={title(f.check)}::{_data(f'{f.where}: {_message(f)}')}"
        for f in report.findings
    ]
    verdict = ("valid" if report.is_valid else "not valid") + report.verdict_suffix
    return (
        "\n".join([*lines, f"::notice title={command}::{_data(f'{report.checkpoint} is {verdict}')}"]) + "\n"
    )


def as_markdown(report: Report) -> str:
    """A table of checks and a list of findings."""
    verdict = "valid" if report.is_valid else "**not valid**"
    lines = [f"{_code(report.checkpoint)} ({report.format}) is {verdict}{report.verdict_suffix}", ""]
    lines += ["| check | looked at | errors | warnings |", "|---|---:|---:|---:|"]
    for check in report.checks:
        warnings = len(check.findings) - check.errors
        lines.append(f"| {check.name} | {check.looked_at:,} {check.unit} | {check.errors} | {warnings} |")
    lines += [""] if report.findings else []
    for f in report.findings:
        lines.append(f"- **{f.severity}** {f.check}: {_code(f.where)}: {_code(_message(f))}")
    return "\n".join(lines) + "\n"


def grouped(found: Iterable[Finding]) -> Iterator[str]:
    """Findings as text; of those that say the same but for numbers and their place three, and how many more."""
    same_kind: dict[tuple[str, str, str], list[str]] = {}
    for finding in found:
        kind = (finding.severity, finding.check, _NUMBERS.sub("#", _message(finding)))
        same_kind.setdefault(kind, []).append(plain(finding))
    for lines in same_kind.values():
        most = len(lines) if len(lines) <= _ALIKE + 1 else _ALIKE
        yield from lines[:most]
        if len(lines) > most:
            yield f"... and {len(lines) - most:,} more like these (--json lists all)"


def plain(finding: Finding) -> str:
    """A finding as text that a terminal does not act on."""
    return escape_lines(f"{finding.severity}: {finding.check}: {escape(finding.where)}: {_message(finding)}")


def _message(finding: Finding) -> str:
    return f"{finding.message.removesuffix('.')}. Fix: {finding.fix}" if finding.fix else finding.message


def _code(text: str) -> str:
    """A code span of Markdown: in one, nothing is a link, a mention, HTML or the end of a cell."""
    shown = escape(" ".join(text.split())).translate(_IN_CODE)
    return f"`{shown or ' '}`"


def _data(text: str) -> str:
    """Escaped as GitHub's runner wants messages."""
    return escape_lines(text).replace("%", "%25").replace("\n", "%0A")
