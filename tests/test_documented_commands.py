"""Every command line in the documents runs and ends as they say, every output that they show is printed."""

import re
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.typed import ELSEWHERE, PLACES, Reader, places, steps, typed

PAGES = [
    REPO / "README.md",
    REPO / "ckpt_tools" / "for-agents.md",
    *sorted((REPO / ".github" / "docs").rglob("*.md")),
]


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return places(tmp_path_factory.mktemp("typed") / "places")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_a_document_can_be_typed_from_top_to_bottom(page, ready, tmp_path, monkeypatch, capsys):
    for name in PLACES:
        (tmp_path / name).symlink_to(ready / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    reader = Reader(capsys)
    try:
        for step in steps(page.read_text()):
            reader.take(step)
    finally:
        reader.close()


def test_the_convention_is_read_as_it_is_written():
    """Otherwise a line could pass because nothing ran it."""
    text = "a\n```bash\nx one \\\n  two   # why; exit code 3\n# a remark\n```\n```yaml\nz\n```\n```text\nsaid\n```\n"
    first, second = steps(text)
    assert (first.kind, first.line, second.kind, second.line) == ("bash", 3, "text", 11)
    assert list(typed(first.body)) == [("x one two", 3)]


def test_every_line_of_another_program_that_is_allowed_is_there():
    lines = [line for page in PAGES for step in steps(page.read_text()) if step.kind == "bash"
             for line, _ in typed(step.body)]  # fmt: skip
    assert not [known for known in ELSEWHERE if not any(re.match(known, line) for line in lines)]


@pytest.mark.parametrize(
    "block",
    [
        "```bash\ncheckpoint-inspector ls NOWHERE\n```\n",
        "```bash\ncheckpoint-inspector ls RUN   # exit code 3\n```\n",
        "```bash\nrm -rf /\n```\n",
        "```bash\ncheckpoint-inspector ls RUN\n```\n```text\n17 iterations\n```\n",
        "```bash\ncheckpoint-inspector ls RUN\n```\n```text\n* the latest\niter_0000002\n```\n",
        "```python\nassert 1 + 1 == 3\n```\n",
    ],
    ids=["command fails", "other exit code", "other program", "not printed", "other order", "python"],
)
def test_a_document_that_is_wrong_is_found(block, ready, monkeypatch, capsys):
    monkeypatch.chdir(ready)
    reader = Reader(capsys)
    with pytest.raises(AssertionError):
        for step in steps(block):
            reader.take(step)
