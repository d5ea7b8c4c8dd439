"""The documents are true where a program can check: commands, options, links, file names, numbers, messages."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from ckpt_tools.cli import manual
from ckpt_tools.cli.commands import REMOVED
from ckpt_tools.megatron.huggingface.config.ledger import arguments
from tests.cli.options import OPTIONS
from tests.conftest import REPO

PACKAGE = REPO / "ckpt_tools"
README = REPO / "README.md"
HOUSE = PACKAGE / "README.md"
CONTRIBUTING = REPO / ".github" / "CONTRIBUTING.md"
PAGES = REPO / ".github" / "docs"
HUGGING_FACE = PAGES / "tasks" / "huggingface.md"
MESSAGES = PAGES / "messages.md"
SPEED = PAGES / "plan.md"
LIMITS = PAGES / "limits.md"
PROOFS = REPO / "tests" / "README.md"
DOCUMENTS = (
    README,
    HOUSE,
    PROOFS,
    CONTRIBUTING,
    REPO / "CHANGELOG.md",
    PACKAGE / "for-agents.md",
    *sorted(PAGES.rglob("*.md")),
)
ROOMS = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
PROGRAM = re.compile(r"^(?:torchrun .*-m ckpt_tools|python3? -m ckpt_tools|checkpoint-inspector) ")


def _name(path: Path) -> str:
    return str(path.relative_to(REPO))


def _blocks(text: str) -> list[str]:
    """Lines of fenced shell blocks, without their comments."""
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    return [line.partition(" #")[0].strip() for line in lines]


def _commands(text: str) -> list[list[str]]:
    """The words of every command of the program: in shell blocks, and in code that begins with a command's name."""
    found = [PROGRAM.sub("", line) for line in _blocks(text) if PROGRAM.match(line)]
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
        words = PROGRAM.sub("", code)
        if words.partition(" ")[0] in OPTIONS and " " in words:
            found.append(words)
    return [shlex.split(words.replace("…", "").replace("...", "")) for words in found]


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_commands_and_their_options_exist(document):
    for command, *words in _commands(document.read_text()):
        assert command in manual.PAGES, command
        own = words[: words.index("--")] if "--" in words else words
        unknown = {word.partition("=")[0] for word in own if word.startswith("-")} - set(
            OPTIONS[command].split()
        )
        if document.name == "CHANGELOG.md":  # names removed options too
            unknown = {option for option in unknown if f"{command} {option}" not in REMOVED}
        assert not unknown, (command, unknown)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_options_in_the_text_exist(document):
    """Options of this program, or of Megatron and other tools where the text is about them."""
    ours = {option for options in OPTIONS.values() for option in options.split()}
    options = set(re.findall(r"`(--[a-z][a-z0-9_-]+)", document.read_text()))
    foreign = {
        *("--load", "--save", "--ckpt-step", "--finetune", "--no-load-rng", "--fp8-param-gather"),
        *(
            "--override-opt_param-scheduler",
            "--no-load-optim",
            "--dist-ckpt-optim-fully-reshardable",
            "--ckpt-format",
        ),
        *(
            "--dump-param-to-param-group-map",
            "--enable-gpt-oss",
            "--help",
            "--help-all",
            "--version",
            "--for-agents",
        ),
    }
    assert not options - ours - foreign - REMOVED.keys()  # the changelog names those that went


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        place = document.parent / path if path else document
        assert place.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", place.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, (
                target
            )


def test_the_readme_is_read_in_a_minute():
    text = README.read_text()
    assert len(_commands(text)) >= 8
    assert len(text.splitlines()) <= 90
    assert len(text.split()) <= 600


def test_the_two_commands_stay_as_they_are():
    lines = _blocks(README.read_text())
    assert lines[:2] == [
        "bash example-scripts/quickstart.sh",
        "python3 -m venv .venv && .venv/bin/pip install -q torch==2.13.0 -e '.[test]' && .venv/bin/python -m pytest",
    ]


def test_nvidias_long_names_are_documented():
    text = "".join(path.read_text() for path in DOCUMENTS)
    assert "convert-torch-dist-to-fsdp-dtensor" in text
    assert "convert-fsdp-dtensor-to-torch-dist" in text
    assert "compare-two-checkpoint" in text


def test_every_exit_code_is_explained():
    rows = re.findall(r"^\| ([\d, ]+) \| \S", MESSAGES.read_text(), re.M)
    assert [int(code) for row in rows for code in row.split(",")] == [*manual.EXIT_CODES, 70]


def test_the_ledger_is_as_large_as_the_documents_say():
    parts = {name: len(part) for name, part in arguments().parts.items()}
    text = " ".join(HUGGING_FACE.read_text().split())
    assert f"the {sum(parts.values()):,} " in text
    assert f"{parts['carried']} are carried" in text
    assert f"{parts['shape']} are proven by" in text
    assert f"{parts['irrelevant']} have no part" in text


def test_figures_of_speed_were_measured():
    """Seconds and sizes with a fraction; the measurement may have more digits."""
    measured = (REPO / "tests" / "benchmarks" / "RESULTS.md").read_text()
    said = re.findall(r"(?<=[| ])\d+\.\d+(?= (?:\||s\b|x\b|GiB))", SPEED.read_text())
    assert len(said) > 8
    assert not [figure for figure in said if not re.search(rf"(?<![\d.]){re.escape(figure)}", measured)]


def test_every_path_that_the_house_names_exists():
    named = set(re.findall(r"`([\w.-]+/[\w./-]*)`", HOUSE.read_text()))
    assert len(named) > 50
    assert not [path for path in named if not ((PACKAGE / path).exists() or (REPO / path).exists())]


@pytest.mark.parametrize("room", ROOMS, ids=_name)
def test_every_room_has_a_map_of_its_modules(room):
    """One line for each module in the room's `__init__`: "* `name`: what it is"."""
    map_of = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    lines = re.findall(r"^\* `([\w/]+)`: \S", map_of, re.M)
    modules = {path.stem for path in room.glob("*.py")} - {"__init__"}
    modules |= {f"{path.parent.name}/" for path in room.glob("*/__init__.py")}
    assert set(lines) == modules
    assert len(lines) == len(modules)


def _texts() -> str:
    """All string literals of the package; the parts of an f-string are joined without its values."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                found.append("\0".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_messages_are_in_plain_english():
    """`is not a file name`, never `is no file name` or `is none`; `there is no file` is English."""
    odd = re.compile(r".{0,60}(?<!here )\b(?:is|are|was|were|be) (?:no|none)\b(?! longer| more\b).{0,30}")
    assert not odd.findall(_texts())


def test_messages_that_are_explained_are_said():
    listed = re.findall(r"^\| `([^`]+)`(?: \([^|]+\))? \|", MESSAGES.read_text(), re.M)
    limits = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", LIMITS.read_text(), re.M)
    assert len(listed) > 70 and len(limits) > 15
    said = _texts()
    assert not [message for message in listed + limits if message not in said]


def test_proofs_exist():
    """The tests and fixtures that the table of layouts names; a test takes each fixture as a parameter."""
    text = PROOFS.read_text()
    tests = {path.relative_to(REPO / "tests") for path in (REPO / "tests").rglob("*.py")}
    names = {path.name for path in tests}
    files = set(re.findall(r"`([\w/]+\.py)(?:::\w+)?", text)) - {""}
    assert not [
        file
        for file in files
        if Path(file.removeprefix("tests/")) not in tests and Path(file).name not in names
    ]
    table = text.partition("## Layouts and versions")[2]
    fixtures = set(re.findall(r"`((?:core0|v0|main_|bridge_)\w+)`", table))
    sources = "\n".join(path.read_text() for path in (REPO / "tests").rglob("test_*.py"))
    assert len(fixtures) > 20
    assert not [name for name in fixtures if f'"{name}"' not in sources]
