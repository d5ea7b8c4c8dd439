"""`man`: every command has a page that groff reads without a warning, with all its options and its examples."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import ckpt_tools
from ckpt_tools.cli import manual
from ckpt_tools.cli.app import run
from tests.cli.options import OPTIONS

HIDDEN = {"--oom-traceback"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man") / "share" / "man1"
    assert run(["man", "--output", str(folder)]) == 0
    return folder


def plain(text: str) -> str:
    """Roff as the reader sees it."""
    text = re.sub(r"\\f[BR]", "", text).replace("\\-", "-").replace("\\(aq", "'").replace("\\(ga", "`")
    return text.replace("\\e", "\\").replace("\\&", "")


def test_every_command_has_a_page(pages: Path) -> None:
    names = {"checkpoint-inspector.1"} | {f"checkpoint-inspector-{name}.1" for name in manual.PAGES}
    assert {path.name for path in pages.iterdir()} == names


@pytest.mark.parametrize("name", manual.PAGES)
def test_a_page_says_what_help_says(name: str, pages: Path) -> None:
    text = plain((pages / f"checkpoint-inspector-{name}.1").read_text())
    assert f"checkpoint-inspector-{name} - {manual.PAGES[name].summary}\n" in text
    for option in set(OPTIONS[name].split()) - HIDDEN:
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), option
    for what, words in manual.PAGES[name].examples:
        assert f"{what}:\n" in text
        assert manual.command_line(words) in text
    for code in manual.EXIT_CODES:
        assert f".TP\n{code}\n" in text


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
def test_groff_reads_the_pages(pages: Path) -> None:
    files = sorted(map(str, pages.iterdir()))
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", *files], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_one_page_goes_to_stdout(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, file in (
        (["man"], "checkpoint-inspector.1"),
        (["man", "slice"], "checkpoint-inspector-slice.1"),
    ):
        assert run(words) == 0
        assert capsys.readouterr().out == (pages / file).read_text()


def test_an_assistant_gets_its_document_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """As the package holds it, with a name and a description in front that a reader of skills accepts."""
    text = (Path(ckpt_tools.__file__).parent / "for-agents.md").read_text()
    assert run(["man", "--for-agents"]) == 0
    assert capsys.readouterr().out == text
    front = yaml.safe_load(text.split("---\n")[1])
    assert front.keys() == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9-]{1,64}", front["name"])
    assert 100 < len(front["description"]) <= 1024


@pytest.mark.parametrize(
    "words",
    [["nope"], ["slice", "--output", "x"], ["slice", "--for-agents"], ["--for-agents", "-o", "x"]],
    ids=" ".join,
)
def test_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", *words]) == 2
    assert "error: " in capsys.readouterr().err
