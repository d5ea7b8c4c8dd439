"""Names from strangers in everything that is printed: harmless to terminals, CI logs, Markdown, HTML and XML."""

import errno
import html
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree as Xml

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt_tools.cli import findings, render
from ckpt_tools.cli.app import run
from ckpt_tools.cli.options import in_a_folder
from ckpt_tools.commands.look import pages
from ckpt_tools.errors import UsageError
from ckpt_tools.verify.report import Check, Finding, Report
from tests.conftest import DATA, REPO

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
EVIL = [
    "::error::x",
    "  ::stop-commands::x",
    "\n::set-env name=A::b",
    "##vso[task.setvariable variable=A]b",
    "##[command]x",
    "##teamcity[x]",
    "a%0A::x",
    "x\r::y",
    "`; <b>",
    "| a | b |",
    "<script>alert(1)</script>",
    "@everyone",
    "]]>",
    "&amp;",
    "\x1b[31m",
    "\x9b31m",
    "\x07",
    "\u202e",
    "\u2028::x",
    "\ud800",
    "\ufffe",
    "\x00",
    "![x](http://x)",
    "a``b",
    "\\",
    "'\"",
    "\x85::x",
    "\u200b",
    "--><svg onload=x>",
]
names = st.lists(
    st.one_of(st.sampled_from(EVIL), st.text(st.characters(), max_size=5)), min_size=1, max_size=4
).map("".join)
many = settings(max_examples=60, database=None, deadline=None)


def assert_harmless(text: str, ours: str = "") -> None:
    """What a terminal or a CI service would show of `text` is text; lines may begin with `ours`."""
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not re.search(r"##\w*\[", line)
        if not ours or not line.startswith(ours):
            assert not line.lstrip().startswith("::")


def report_of(name: str) -> Report:
    found = (Finding("check", "error", name, name, name), Finding("check", "warning", "a", f"x {name}"))
    return Report(name, "torch_dist", (Check("check", "things", 2, found),))


@many
@given(name=names)
@example(name="\n".join(EVIL))
def test_names(name):
    assert_harmless(render.escape(name))
    assert "\n" not in render.escape(name)
    assert_harmless(render.escape_lines(name))
    assert render.escape_lines(name).count("\n") == name.count("\n")
    assert_harmless(findings.plain(Finding("check", "error", name, name, name)))


@given(name=st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"])))
@many
def test_plain_names_stay_as_they_are(name):
    if "##" not in name and "::" not in name:
        assert render.escape(name) == name


@many
@given(name=names)
@example(name="\n".join(EVIL))
def test_json(name):
    for text in (
        render.json_text({name: [name, {"a": name}]}),
        "".join(render.json_lines({"a": name}, {"b": iter([name])})),
    ):
        assert_harmless(text)
        assert text.isascii()
        assert name in json.loads(text).keys() | {json.loads(text).get("a")}


@many
@given(name=names)
@example(name="\n".join(EVIL))
def test_github(name):
    """Every line is a command of ours, and ends where it began."""
    lines = findings.as_github(report_of(name), "verify").split("\n")
    assert len(lines) == 4
    assert lines.pop() == ""
    for line in lines:
        assert re.fullmatch(r"::(error|warning|notice) title=[^:,\r\n]+::[^\r\n]*", line)
        assert_harmless(line, "::")
        data = line.split("::", 2)[2]
        for part in data.split("%")[1:]:
            assert part[:2] in ("25", "0A")
        assert_harmless("x" + data.replace("%0A", "\nx"))


@many
@given(name=names)
@example(name="\n".join(EVIL))
@example(name="\n".join(reversed(EVIL)))
def test_markdown(name):
    """Outside of code spans there is nothing but our own words."""
    text = findings.as_markdown(report_of(name))
    assert_harmless(text)
    outside = re.sub(r"(?<!`)`[^`\n]+`(?!`)", "", text)
    assert outside == (
        " (torch_dist) is **not valid**\n\n| check | looked at | errors | warnings |\n|---|---:|---:|---:|\n"
        "| check | 2 things | 1 | 1 |\n\n- **error** check: : \n- **warning** check: : \n"
    )
    assert "|" not in "".join(re.findall(r"`[^`\n]+`", text))


@many
@given(name=names)
@example(name="\n".join(EVIL))
def test_junit(name):
    text = findings.as_junit([report_of(name)], "verify")
    assert all(c.isprintable() or c == "\n" for c in text)
    root = Xml.fromstring(text.encode())
    assert [one.tag for one in root.iter()] == ["testsuites", "testsuite", "testcase", "failure"]
    assert root[0].attrib["name"] == render.escape_lines(name)


@many
@given(name=names)
@example(name="\n".join(EVIL))
def test_pictures(name):
    for text in (pages.safe(name),):
        assert all(c.isprintable() or c == "\n" for c in text)
        assert not re.search(r"[<>\"']", text)
        assert html.unescape(text) == render.escape_lines(name) or "##" in name or "::" in name


@many
@given(name=names)
@example(name="\n".join(EVIL))
@example(name=".".join(EVIL))
def test_tables_and_trees(name):
    with pytest.MonkeyPatch.context() as patch:
        import io

        out = io.StringIO()
        patch.setattr(sys, "stdout", out)
        render.print_table(("a", "b"), [(name, 1), (1, name)])
        render.print_tree(name, [(name, name), ("a", "b")])
        assert_harmless(out.getvalue())


@pytest.mark.parametrize(
    "words", ["inspect {}", "verify {} -q", "convert {} out", "diff {} {} -q", "preflight {}", "plan {}"]
)
@pytest.mark.parametrize("name", EVIL[:10:3])
def test_paths_on_stderr(words, name, capsys):
    assert run([word.format(name.replace("/", "")) for word in words.split()]) in (2, 3)
    out, err = capsys.readouterr()
    assert_harmless(err)
    assert_harmless(out)


def shell(line: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], cwd=REPO, capture_output=True, text=True, check=False, timeout=60, **more
    )


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", ["inspect IN --json", "inspect /nowhere", "convert IN OUT"])
def test_closed_streams_end_cleanly(words, closed, tmp_path):
    text = words.replace("IN", str(LLAMA)).replace("OUT", str(tmp_path / "out"))
    found = shell(f"{sys.executable} -m ckpt_tools {text} {closed}")
    assert found.returncode == (3 if "nowhere" in words else 0)
    assert "Traceback" not in found.stderr
    assert "Exception" not in found.stderr
    if "OUT" in words:
        assert run(["verify", str(tmp_path / "out"), "--content"]) == 0


def test_a_full_disk_behind_stdout_is_named_once():
    found = shell(f"{sys.executable} -m ckpt_tools inspect {LLAMA} --json > /dev/full")
    assert (found.returncode, found.stderr.count("\n")) == (7, 1)
    assert "No space left" in found.stderr


@pytest.mark.parametrize("lost", ["2>/dev/full", "2</dev/null"])
@pytest.mark.parametrize(
    ("words", "code"),
    [("verify nowhere", 3), (f"diff {LLAMA} nowhere", 3), ("inspect", 2), (f"inspect {LLAMA} --junk", 2)],
)
def test_a_message_that_cannot_be_written_leaves_the_verdict(words, code, lost):
    assert shell(f"{sys.executable} -m ckpt_tools {words} {lost}").returncode == code


@pytest.mark.parametrize(
    ("words", "is_new"),
    [("verify RUN --write-manifest", True)]  # which replaces nothing
    + [(words, new) for words in ("verify RUN --junit", "inspect RUN --html") for new in (True, False)],
)
def test_a_report_that_cannot_be_written_leaves_nothing_and_the_old_one(words, is_new, tmp_path, monkeypatch):
    file = tmp_path / "report"
    command = [*words.replace("RUN", str(LLAMA)).split(), str(file)]
    if not is_new:
        assert run(command) == 0
        file.chmod(0o640)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "replace", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        )
        assert run(command) == 7
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert run(command) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert is_new or file.stat().st_mode & 0o777 == 0o640


def test_too_little_memory_is_not_a_defect(monkeypatch, capsys):
    def fail(**_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("ckpt_tools.cli.app.app", fail)
    assert run([]) == 7
    assert "not enough memory" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["plan IN --svg -", "plan IN --html -", "build-param-group-map IN -o -"])
def test_a_hyphen_is_stdout_alone(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        run(words.replace("IN", str(LLAMA)).split() + (["--dp-shard", "2"] if "plan" in words else [])) == 0
    )
    out = capsys.readouterr().out
    if "svg" in words:
        Xml.fromstring(out)
    elif "html" in words:
        assert out.startswith("<!doctype html>") and out.endswith("</html>\n")
    else:
        assert json.loads(out)
    assert list(tmp_path.iterdir()) == []


REPORTS = [
    "convert IN OUT -q --report FILE",
    "build-param-group-map IN -o FILE",
    "plan IN --dp-shard 2 --svg FILE",
    "plan IN --dp-shard 2 --html FILE",
    "verify IN -q --junit FILE",
    "export-hf IN OUT -q --report FILE",
]


def test_a_file_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    """Before the work (test_habits). Root may write everywhere, so the system's answer is put in its mouth."""
    real = os.access
    denied = {tmp_path / "reports", tmp_path / "old"}

    def access(path: Path, mode: int) -> bool:
        return not (mode == os.W_OK and Path(path) in denied) and real(path, mode)

    monkeypatch.setattr(os, "access", access)
    (tmp_path / "reports").mkdir()
    (tmp_path / "old").write_text("<old")
    (tmp_path / "dangling").symlink_to("nothing")
    for file in (tmp_path / "reports" / "new", tmp_path / "old", tmp_path / "dangling"):
        with pytest.raises(UsageError, match=f"{file} cannot be written"):
            in_a_folder(file)


@pytest.mark.parametrize("words", REPORTS)
def test_reports_of_a_private_checkpoint_are_private(words, tmp_path):
    import shutil

    shutil.copytree(LLAMA, tmp_path / "run")
    (tmp_path / "run").chmod(0o700)
    (tmp_path / "old").write_text("{}")
    (tmp_path / "old").chmod(0o640)
    for file, mode in ((tmp_path / "new", 0o600), (tmp_path / "old", 0o640)):
        places = {"IN": str(tmp_path / "run"), "OUT": str(tmp_path / f"out{mode}"), "FILE": str(file)}
        assert run([places.get(word, word) for word in words.split()]) == 0
        assert file.stat().st_mode & 0o777 == mode
        assert file.read_text() != "{}"


def test_a_terminal_shows_no_command_of_a_hostile_key():
    began = time.process_time()
    assert_harmless(render.escape("##" * 100_000 + "["))
    assert_harmless(render.escape("##a" * 100_000))
    assert time.process_time() - began < 1
