"""`--overwrite` replaces one checkpoint of a kind that this tool writes, at its very path, and nothing else."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_tools.cli.app import run
from ckpt_tools.execute.run import _Run
from tests.cli.test_nothing_left import RUN, WRITERS
from tests.cli.test_nothing_left import places as places  # noqa: PLC0414  a fixture
from tests.folders import content

FOREIGN = [
    "notes.txt",
    "sub/x.distcp",
    "iter_0000009/.metadata",
    "latest_checkpointed_iteration.txt",
    "optimizer.pt",
]
MARKS = (".metadata", "config.json")


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    fs = MemoryFileSystem()
    fs.store.clear()
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


class Output:
    """A folder on a disk or in a store, and what lies in it."""

    def __init__(self, location: str, memory: MemoryFileSystem) -> None:
        self.location, self._memory = location, memory

    def files(self) -> dict[str, bytes]:
        if "://" in self.location:
            root = self.location.removeprefix("memory:/")
            return {
                p.removeprefix(f"{root}/"): self._memory.cat_file(p, None, None)
                for p in self._memory.find(root)
            }
        return content(Path(self.location))

    def put(self, name: str, data: bytes) -> None:
        if "://" in self.location:
            self._memory.pipe_file(f"{self.location.removeprefix('memory:/')}/{name}", data)
        else:
            (path := Path(self.location, name)).parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def remove(self, name: str) -> None:
        if "://" in self.location:
            self._memory.rm_file(f"{self.location.removeprefix('memory:/')}/{name}")
        else:
            shutil.rmtree(path) if (path := Path(self.location, name)).is_dir() else path.unlink()


@pytest.mark.parametrize("store", [False, True], ids=["disk", "store"])
@pytest.mark.parametrize("name", WRITERS)
def test_one_checkpoint_is_replaced_and_nothing_else(name, store, places, memory, capsys):
    if store:
        places = {**places, "OUT": "memory://over/runs/out"}
    words = [*(places.get(word, word) for word in WRITERS[name]), "--overwrite", "--json"]
    out = Output(places["OUT"], memory)
    assert run(words) == 0
    assert '"replaced": null' in capsys.readouterr().out
    new = out.files()
    mark = next(one for one in new if one.rpartition("/")[2] in MARKS)
    folder = mark.rpartition("/")[0]
    for foreign in FOREIGN:
        path = f"{folder}/{foreign}".removeprefix("/")
        out.put(path, b"precious")
        before = out.files()
        assert run(words) == 2, foreign
        told = capsys.readouterr().err
        assert "is not replaced: " in told
        assert foreign.partition("/")[0] in told
        assert out.files() == before
        out.remove(path)
        if not store and "/" in path.removeprefix(f"{folder}/"):
            out.remove(path.rpartition("/")[0])
    out.remove(mark)  # a job may still be writing it
    before = out.files()
    assert run(words) == 2
    assert "is not replaced: " in capsys.readouterr().err
    assert out.files() == before
    out.put(mark, b"damaged")
    assert run(words) == 0
    kind = "a Hugging Face model" if mark.endswith("config.json") else "a distributed checkpoint"
    assert f'"replaced": "{kind}: ' in capsys.readouterr().out
    assert out.files().keys() == new.keys()
    if folder:
        out.put("neighbour/x", b"precious")
        assert run(words) == 0
        assert out.files().keys() == {*new, "neighbour/x"}


@pytest.mark.parametrize("store", [False, True], ids=["disk", "store"])
def test_what_appears_at_the_output_meanwhile_stays(store, tmp_path, memory, monkeypatch, capsys):
    out = Output("memory://over/iter_0000002" if store else str(tmp_path / "iter_0000002"), memory)
    words = ["copy", str(RUN / "iter_0000002"), out.location, "--overwrite"]
    assert run(words) == 0
    prove = _Run._prove

    def and_then_another_program(self):
        out.put("notes.txt", b"precious")
        return prove(self)

    monkeypatch.setattr(_Run, "_prove", and_then_another_program)
    before = out.files()
    assert run(words) == 2
    assert "notes.txt" in capsys.readouterr().err
    assert out.files() == {**before, "notes.txt": b"precious"}


def _view(tmp_path: Path) -> None:
    """A folder of links to the files of another."""
    (tmp_path / "view").mkdir()
    for path in (tmp_path / "RUN/iter_0000002").iterdir():
        (tmp_path / "view" / path.name).symlink_to(path)


@pytest.mark.parametrize(
    "words",
    [
        "convert bare OTHER",
        "convert bare .",
        "copy RUN/iter_0000002 RUN/iter_0000002",
        "copy RUN/iter_0000002 link",
        "copy link RUN/iter_0000002",
        "copy linked/iter_0000002 RUN/iter_0000002",
        "copy RUN/iter_0000002 RUN/iter_0000002/out",
        "copy view RUN/iter_0000002 --follow-links",
        "copy RUN RUN",
        "strip RUN linked",
        "export-hf RUN HF --hf-config HF",
        "export-hf RUN tokenizer",
        "convert bare files",
        "average RUN OTHER RUN",
    ],
)
def test_no_source_and_nothing_foreign_is_replaced(words, places, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RUN, "OTHER")
    shutil.copytree("OTHER/iter_0000002", "OTHER/iter_0000001")
    shutil.copytree("OTHER/iter_0000002", "bare")  # no run's iteration: the output is one folder
    Path("link").symlink_to("RUN/iter_0000002")
    Path("linked").symlink_to("RUN")
    _view(tmp_path)
    for name in ("files/notes.txt", "tokenizer/tokenizer.json", "tokenizer/config.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert run([*words.split(), "--overwrite"]) == 2
    assert words.split()[-1 if words.startswith("average") else 2] in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["fifo", "socket", "dangling", "folder", "linked folder"])
def test_what_is_not_a_file_is_never_replaced(kind, places, tmp_path, capsys):
    out = Path(shutil.copytree(RUN / "iter_0000002", tmp_path / "iter_0000002"))
    odd = out / "model.distcp"
    match kind:
        case "fifo":
            os.mkfifo(odd)
        case "socket":
            os.mknod(odd, 0o600 | stat.S_IFSOCK)
        case "folder":
            odd.mkdir()
        case _:
            odd.symlink_to(tmp_path if kind == "linked folder" else "nowhere")
    assert run(["copy", str(RUN / "iter_0000002"), str(out), "--overwrite"]) == 2
    assert "model.distcp" in capsys.readouterr().err
    assert odd.name in os.listdir(out)
