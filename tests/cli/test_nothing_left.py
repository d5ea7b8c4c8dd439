"""Where outputs go: a command that is refused leaves nothing, `--overwrite` replaces one checkpoint at its very path.

Places that no output can have are refused.
"""

import os
import shutil
import stat
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_tools.cli.app import run
from ckpt_tools.execute.output.local_output import LocalOutput
from ckpt_tools.execute.run import _Run
from tests.commands.made import hf
from tests.conftest import FSDP, LLAMA, RUN
from tests.folders import content

Command = tuple[str, ...]
WRITERS: dict[str, Command] = {
    "convert": ("convert", "RUN", "OUT"),
    "convert to dcp": ("convert", "RUN", "OUT", "--to", "dcp"),
    "convert back": ("convert", "FSDP", "OUT", "--to", "torch_dist"),
    "lay out anew": ("convert", "FSDP", "OUT", "--gpus", "3"),
    "export-hf": ("export-hf", "RUN", "OUT"),
    "import-hf": ("import-hf", "HF", "OUT"),
    "copy": ("copy", "RUN", "OUT"),
    "copy all": ("copy", "RUN", "OUT", "--iteration", "all"),
    "strip": ("strip", "RUN", "OUT"),
    "slice": ("slice", "RUN", "OUT", "--layers", "0:1"),
    "average": ("average", "RUN", "RUN", "OUT"),
    "modify-state-dict": ("modify-state-dict", "RUN", "OUT", "--op", "remove rng_state.*"),
}  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Sources, and an output two folders below one that is there."""
    for name, source in (("RUN", RUN), ("FSDP", FSDP)):
        shutil.copytree(source, tmp_path / name)
    shutil.copytree(hf(LLAMA), tmp_path / "HF")
    return {name: str(tmp_path / name) for name in ("RUN", "FSDP", "HF")} | {
        "OUT": str(tmp_path / "new/runs/out")
    }


def tree(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("name", WRITERS)
def test_where_the_disk_is_full(name, places, tmp_path, monkeypatch, capsys):
    before = tree(tmp_path)
    status = os.statvfs(tmp_path)
    fields = [field for field in dir(status) if field.startswith("f_")]
    full = namedtuple("Full", fields)(**{f: getattr(status, f) for f in fields} | {"f_bavail": 3})
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    for dry in (["--dry-run"], []):
        assert run([*(places.get(word, word) for word in WRITERS[name]), *dry]) == 7
        assert " free, but " in capsys.readouterr().err
    monkeypatch.undo()
    left = [str(path.relative_to(tmp_path)) for path in tree(tmp_path) if path not in before]
    assert left == []


NAMELESS = [(name, output) for name in WRITERS for output in ("", "s3://")]


@pytest.mark.parametrize(("name", "output"), [*NAMELESS, ("convert", "file://"), ("convert", "memory:///")])
def test_where_the_output_has_no_name(name, output, places, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = os.listdir("/")
    assert run([{**places, "OUT": output}.get(word, word) for word in WRITERS[name]]) == 2
    error = capsys.readouterr().err
    assert ("is empty" if output in ("", "file://") else "does not name a folder") in error
    assert not os.listdir() and os.listdir("/") == before


@pytest.mark.parametrize("store", [False, True], ids=["disk", "store"])
@pytest.mark.parametrize("name", WRITERS)
def test_where_the_output_is_taken(name, store, places, memory, capsys):
    """A dry run says so in the words of the run."""
    places = {**places, "OUT": "memory://over/runs/out"} if store else places
    words = [places.get(word, word) for word in WRITERS[name]]
    if name == "copy all":  # what is there is passed over
        words = words[:-2]
    folder = {"export-hf": "", "import-hf": "release/"}.get(name, "iter_0000002/")
    Output(places["OUT"], memory).put(f"{folder}mine", b"precious")
    told = []
    for dry in (["--dry-run"], []):
        assert run([*words, *dry]) == 2
        told.append(capsys.readouterr().err)
    assert "is not empty" in told[0] and told[0] == told[1]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kept", [False, True])
def test_where_the_source_is_damaged(name, kept, places, tmp_path):
    """A folder that somebody else has put there meanwhile, or before, stays."""
    for file in tmp_path.rglob("__0_0.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    for file in tmp_path.rglob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 1)
    if kept:
        (tmp_path / "new").mkdir()
    before = tree(tmp_path)
    assert run([places.get(word, word) for word in WRITERS[name]]) in (1, 4)
    assert [str(path.relative_to(tmp_path)) for path in tree(tmp_path) if path not in before] == []
    assert (tmp_path / "new").exists() == kept


@pytest.mark.parametrize("words", WRITERS.values())
def test_where_the_source_is_absent(words, places, tmp_path):
    for source in ("RUN", "FSDP", "HF"):
        shutil.rmtree(tmp_path / source)
    assert run([places.get(word, word) for word in words]) == 3
    assert tree(tmp_path) == []


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
    for foreign in FOREIGN if name in ("convert", "export-hf") else FOREIGN[:1]:
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


ITERATION = "iter_0000002"


def convert(*words: object) -> int:
    return run(["convert", *map(str, words), "--quiet"])


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("source", [RUN, RUN / ITERATION], ids=["root", "iteration"])
@pytest.mark.parametrize("output", ["file", "file/below", "file/further/below", "dangling", "full"])
def test_what_stands_in_the_way_is_refused_and_left_alone(tmp_path, capsys, source, output):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "dangling").symlink_to("nowhere")
    for folder in ("full", f"full/{ITERATION}"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "precious").write_text("precious")
    before = names_below(tmp_path)
    assert convert(source, tmp_path / output) == 2
    assert "choose another output" in capsys.readouterr().err
    assert names_below(tmp_path) == before


@pytest.mark.parametrize("output", ["bare", ITERATION, "root"])
def test_a_folder_that_no_job_finds_is_said_to_be_one(tmp_path, capsys, output):
    copytree(RUN / ITERATION, tmp_path / "source")
    source = tmp_path / "source" if output == "bare" else RUN if output == "root" else RUN / ITERATION
    assert run(["convert", str(source), str(tmp_path / output)]) == 0
    assert ("no job finds this folder" in capsys.readouterr().out) == (output == "bare")


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "is_mount", lambda path: path.parent == tmp_path)
    (tmp_path / ITERATION).mkdir()
    assert convert(RUN / ITERATION, tmp_path / ITERATION) == 2
    assert "mount point" in capsys.readouterr().err
    assert names_below(tmp_path) == [ITERATION]
    (tmp_path / "run").mkdir()
    assert convert(RUN, tmp_path / "run") == 0  # the iteration lies inside it


@pytest.mark.parametrize("output", [".", "../here", "../here/", "../here/.", "deeper/.."])
def test_spellings_of_the_current_directory(tmp_path, monkeypatch, output):
    here = tmp_path / "here"
    (here / "deeper").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert convert(RUN, output) == 0
    assert sorted(os.listdir(here)) == ["deeper", ITERATION, "latest_checkpointed_iteration.txt"]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert convert(RUN / ITERATION, ".") == 0
    assert sorted(os.listdir(tmp_path / "empty")) == [ITERATION, "latest_checkpointed_iteration.txt"]
    assert sorted(os.listdir(tmp_path)) == ["empty", "here"]


def test_files_that_appear_in_the_output_meanwhile_are_kept(tmp_path, monkeypatch, capsys):
    create_files = LocalOutput.create_files

    def and_then_another_program(output: LocalOutput) -> None:
        create_files(output)
        output.final.mkdir()
        (output.final / "precious").write_text("precious")

    monkeypatch.setattr(LocalOutput, "create_files", and_then_another_program)
    assert convert(RUN / ITERATION, tmp_path / ITERATION) == 7
    assert f"{tmp_path}/{ITERATION}" in capsys.readouterr().err
    assert os.listdir(tmp_path / ITERATION) == ["precious"]
    (tmp_path / ITERATION / "precious").unlink()
    monkeypatch.undo()
    assert convert(RUN / ITERATION, tmp_path / ITERATION, "--resume") == 0
    assert sorted(os.listdir(tmp_path)) == [ITERATION]


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "CKPT", "OUT", "--quiet", "--report"],
        ["stats", "CKPT", "--html"],
        ["stats", "CKPT", "--svg"],
        ["inspect", "CKPT", "--html"],
        ["plan", "CKPT", "--html"],
        ["verify", "CKPT", "--junit"],
        ["print-torch-dcp-in-json", f"CKPT/{ITERATION}", "--no-write", "-o"],
        ["build-param-group-map", "CKPT", "-o"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_report_never_replaces_a_file_of_a_checkpoint_or_any_other(tmp_path, words, capsys):
    root = copytree(RUN, tmp_path / "run")
    (tmp_path / "script.sh").write_text("#!/bin/sh")
    (tmp_path / "old.json").write_text("{}")
    files = [
        root / ITERATION / ".metadata",
        root / ITERATION / "metadata.json",
        root / ITERATION / "new.json",
    ]
    files += [root / "latest_checkpointed_iteration.txt", tmp_path / "script.sh"]
    given = [word.replace("CKPT", str(root)).replace("OUT", str(tmp_path / "out")) for word in words]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for file in files:
        assert run([*given, str(file)]) == 2
        assert f"{file} cannot be written" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert run([*given, str(tmp_path / "old.json")]) == 0


@pytest.mark.parametrize("words", [("convert",), ("copy",)])
def test_links_that_lead_in_a_circle(tmp_path, capsys, words):
    (tmp_path / "circle").symlink_to("circle")
    assert run([words[0], str(RUN), str(tmp_path / "circle"), *words[1:]]) in (2, 7)
    assert run([words[0], str(tmp_path / "circle"), str(tmp_path / "out"), *words[1:]]) in (3, 7)
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert shown.count("circle") >= 2
    assert names_below(tmp_path) == ["circle"]
