"""A report of checks in the forms that people, CI services and programs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_tools.cli.render import escape, escape_lines

if TYPE_CHECKING:
    from ckpt_tools.verify.report import Finding, Report

SCHEMA_VERSION = 1
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


def as_junit(report: Report, command: str) -> str:
    """JUnit's XML: a test case a check, failed when it has errors."""
    from xml.etree import ElementTree as Xml

    failed = sum(check.errors > 0 for check in report.checks)
    counts = {"tests": str(len(report.checks)), "failures": str(failed), "errors": "0", "skipped": "0"}
    suites = Xml.Element("testsuites", counts)
    suite = Xml.SubElement(suites, "testsuite", {"name": escape_lines(report.checkpoint), **counts})
    for check in report.checks:
        case = Xml.SubElement(suite, "testcase", {"classname": f"ckpt_tools.{command}", "name": check.name})
        lines = [plain(finding) for finding in check.findings]
        if check.errors:
            failure = Xml.SubElement(case, "failure", {"message": f"{check.errors} errors"})
            failure.text = "\n".join(lines)
        elif lines:
            Xml.SubElement(case, "system-out").text = "\n".join(lines)
    Xml.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(suites, encoding="unicode") + "\n"


def as_github(report: Report, command: str) -> str:
    """Workflow commands of GitHub Actions: an annotation a finding."""
    lines = [
        f"::{f.severity} title={_property(f'{command} {f.check}')}::{_data(f'{f.where}: {_message(f)}')}"
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


def plain(finding: Finding) -> str:
    """A finding as text that a terminal does not act on."""
    return escape_lines(f"{finding.severity}: {finding.check}: {escape(finding.where)}: {_message(finding)}")


def _message(finding: Finding) -> str:
    return f"{finding.message}. Fix: {finding.fix}" if finding.fix else finding.message


def _code(text: str) -> str:
    """A code span of Markdown: in one, nothing is a link, a mention, HTML or the end of a cell."""
    shown = escape(" ".join(text.split())).translate(_IN_CODE)
    return f"`{shown or ' '}`"


def _data(text: str) -> str:
    """Escaped as GitHub's runner wants messages."""
    return escape_lines(text).replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
