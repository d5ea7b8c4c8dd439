"""Files from strangers: each is refused with its own message, in bounded time and memory, and runs nothing."""

import json
import subprocess
import sys

import pytest

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.torch_archive.item_reader import load_object, whole_file
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
