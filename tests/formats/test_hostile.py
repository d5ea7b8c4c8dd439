"""Files and settings from strangers: refused by name, in bounded time and memory, and nothing is run."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.torch_archive.item_reader import load_object, whole_file
from ckpt_tools.formats.untrusted_documents import (
    MAX_YAML_BYTES,
    DocumentError,
    parse_json,
    parse_yaml,
    read_named_file,
)
from tests.conftest import DATA, REPO

HOSTILE = DATA / "hostile"
EXPECTED: dict[str, str] = json.loads((HOSTILE / "expected.json").read_text())


class OneFile(LocalFiles):
    """A folder in which a hostile file stands for `.metadata`."""

    def __init__(self, name: str) -> None:
        super().__init__(str(HOSTILE))
        self._name = name

    def exists(self, name: str) -> bool:
        return True

    def size(self, name: str) -> int:
        return super().size(self._name)

    def read(self, name: str, offset: int, length: int) -> bytes:
        return super().read(self._name, offset, length)


def read(name: str) -> object:
    files = OneFile(name)
    try:
        return (
            read_catalog(files) if name.endswith(".metadata") else load_object(files, whole_file(files, name))
        )
    finally:
        files.close()


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.timeout(10)
def test_refused_with_its_message(name):
    with pytest.raises(CkptError) as found:
        read(name)
    assert EXPECTED[name] in str(found.value)
    assert found.value.exit_code in (3, 4)


def test_corpus_is_what_the_script_writes(tmp_path):
    script = tmp_path / "make.py"
    script.write_bytes((HOSTILE / "make.py").read_bytes())
    subprocess.run([sys.executable, script], check=True)
    names = {path.name for path in HOSTILE.iterdir() if path.is_file()}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert all((tmp_path / name).read_bytes() == (HOSTILE / name).read_bytes() for name in names)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 150_000


AUDIT = """
import resource, sys, threading
from tests.formats.test_hostile import EXPECTED, HOSTILE, read
from ckpt_tools.errors import CkptError
import numpy
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
seen = []
harmless = {"os.listdir", "os.scandir", "object.__getattr__", "sys._getframe", "array.__new__", "builtins.id"}
def hook(event, args):
    inside = event == "open" and str(args[0]).startswith(str(HOSTILE))
    if event not in harmless and not inside:
        seen.append((event, args))
sys.addaudithook(hook)
refused = 0
for name in EXPECTED:
    try:
        read(name)
    except CkptError:
        refused += 1
events = list(seen)
print(refused, len(EXPECTED), events)
"""


def test_nothing_is_imported_run_or_opened():
    run = subprocess.run([sys.executable, "-c", AUDIT], cwd=REPO, capture_output=True, text=True, check=False)
    assert run.stdout == f"{len(EXPECTED)} {len(EXPECTED)} []\n", run.stdout + run.stderr


ALIASES = b"a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\nd: [*a, *a]\n"


@pytest.mark.parametrize(
    "text", [b"", b"a: 1", b"- 1\n- [x, {y: null}]", ALIASES, b"x: 2026-01-01", b"---\n"]
)
def test_yaml_means_what_pyyaml_says(text):
    assert parse_yaml(text) == yaml.safe_load(text)


def bomb(line: str) -> bytes:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {line.replace('@', f'*a{i - 1}')}" for i in range(1, 30)]
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (bomb("[@, @, @, @, @, @, @, @, @]"), "its aliases make more than"),
        (bomb("{k: @, l: @}"), "its aliases make more than"),
        (bomb("{<<: [@, @, @, @, @, @, @, @, @]}"), "its aliases make more than"),
        (b"a: &a [*a]", "an alias names what it is a part of"),
        (b"&a {b: {c: *a}}", "an alias names what it is a part of"),
        (b"[" * 80 + b"]" * 80, "nested deeper than 64"),
        (b"[" * 5_000, "nested too deep"),
        (b"a" * (MAX_YAML_BYTES + 1), "at most 1,048,576"),
        (b"!!python/object/apply:os.system [true]", "not YAML"),
        (b"a: 1\n--- \nb: 2", "not YAML"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"\x1b[31m", "not YAML"),
        (b"!!int x", "not YAML"),
        (b"!!timestamp 2026-99-99", "not YAML"),
        (b"? [a]\n: 1", "not YAML"),
    ],
    ids=range(15),
)
def test_yaml_bombs_and_rubbish_are_refused(text, why):
    began = time.process_time()
    with pytest.raises(DocumentError, match=why):
        parse_yaml(text)
    assert time.process_time() - began < 2


def test_json():
    assert parse_json(b'{"a": [1, null]}') == {"a": [1, None]}
    for text, why in ((b"[" * 5_000, "nested too deep"), (b"{", "not JSON"), (b"\xff", "not JSON")):
        with pytest.raises(DocumentError, match=why):
            parse_json(text)


def test_files_that_users_name_are_bounded(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10)
    assert read_named_file(tmp_path / "a", 10) == b"x" * 10
    with pytest.raises(DocumentError, match="more than 9 bytes"):
        read_named_file(tmp_path / "a", 9)
    with pytest.raises(DocumentError, match="more than 9 bytes"):
        read_named_file(Path("/dev/zero"), 9)
