"""Two runs with one output in a store: the later has it, whenever it comes; the other stops and touches nothing."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_tools.errors import CorruptCheckpointError, StorageError, UsageError
from ckpt_tools.execute.output import remote_output
from ckpt_tools.execute.output.remote_output import MARKER, Stretch, Uploads
from ckpt_tools.execute.run import Output, write_checkpoint
from ckpt_tools.formats.dcp.metadata_read import METADATA
from ckpt_tools.formats.storage import object_store as store_module
from ckpt_tools.formats.storage.object_store import Store
from tests.execute.conftest import Case, make_case

OUT = Output("memory://out/run", beside={"tracker": b"7"}, extra_files={"extra": b"a"})
FOLDER = "/out/run"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("source") / "ckpt")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    fs = MemoryFileSystem()
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], None]]:
    """What to do just before a step: `put NAME`, `write NAME`, `remove NAME`. Each is done once."""
    chosen: dict[str, Callable[[], None]] = {}

    def before(kind: str, owner: type, method: str) -> None:
        original = getattr(owner, method)

        def called(self: Any, *args: Any) -> Any:
            name = next(getattr(one, "file", one) for one in args if isinstance(one, str | Stretch))
            chosen.pop(f"{kind} {name}", lambda: None)()
            return original(self, *args)

        monkeypatch.setattr(owner, method, called)

    before("put", Store, "put")
    before("write", Uploads, "_upload")
    before("remove", Store, "remove")
    return chosen


def _content(fs: MemoryFileSystem) -> dict[str, bytes]:
    return {path: fs.cat_file(path, None, None) for path in fs.find("/out")}


def _convert(case: Case, world: int = 3, **changes: Any) -> None:
    write_checkpoint(case.plan(world), case.files, replace(OUT, **changes))


@pytest.fixture(scope="module")
def whole(case: Case) -> dict[str, bytes]:
    """What a run of two ranks leaves that nobody disturbs."""
    _convert(case, 2)
    found = _content(MemoryFileSystem())
    MemoryFileSystem.store.clear()
    return found


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        (f"put {MARKER}", {"overwrite": True}),
        (f"put {MARKER}", {"overwrite": True, "resume": True}),  # later ones would go on with another plan
        ("write __0_0.distcp", {"overwrite": True}),
        ("write __2_0.distcp", {"overwrite": True}),
        ("put extra", {"overwrite": True}),
        (f"put {METADATA}", {"overwrite": True}),
        (f"remove {MARKER}", {"overwrite": True}),
    ],
)
def test_the_later_run_has_the_output_whenever_it_comes(moment, how, case, whole, memory, steps):
    """The later one comes at each step of the first, and runs to its end before the first one goes on."""
    steps[moment] = lambda: _convert(case, 2, **how)
    if moment == f"put {MARKER}":  # the first comes last after all, and has looked before
        _convert(case, 3)
        assert f"{FOLDER}/{MARKER}" not in _content(memory)
        return
    if moment == f"remove {MARKER}":
        _convert(case, 3)  # it had published; then it was replaced as any checkpoint may be
    else:
        with pytest.raises(UsageError, match=r"memory://out/run was taken by another converter|it has ended"):
            _convert(case, 3)
    found = _content(memory)
    if moment == f"put {METADATA}":
        assert found[f"{FOLDER}/{METADATA}"] != whole[f"{FOLDER}/{METADATA}"]  # what no check can close
        return
    assert found == whole


def test_the_loser_exits_with_2_and_leaves_the_winner_alone(case, memory, steps):
    """The winner has only begun: its marker and first file are there when the loser notices."""

    def take() -> None:
        header = json.dumps(
            {"digest": "x", "source": [], "token": "other", "owner": "process 5 on there"}
        ).encode()
        memory.pipe_file(f"{FOLDER}/{MARKER}", header)
        memory.pipe_file(f"{FOLDER}/__7_0.distcp", b"the winner's")

    steps["write __1_0.distcp"] = take
    with pytest.raises(UsageError, match=r"was taken by another converter \(process 5 on there\)") as caught:
        _convert(case)
    assert caught.value.exit_code == 2
    found = _content(memory)
    assert json.loads(found[f"{FOLDER}/{MARKER}"])["token"] == "other"
    assert found[f"{FOLDER}/__7_0.distcp"] == b"the winner's"
    assert f"{FOLDER}/{METADATA}" not in found
    assert "/out/tracker" not in found


def test_a_file_that_another_run_replaced_is_not_published(case, memory, steps):
    """An upload of the loser that ends late, in a winner's folder, with as many bytes."""
    name = f"{FOLDER}/__0_0.distcp"
    steps["put extra"] = lambda: memory.pipe_file(name, bytes(memory.size(name)))
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp changed after this run had uploaded it"):
        _convert(case)
    assert f"{FOLDER}/{METADATA}" not in _content(memory)


def test_a_marker_that_is_none_is_named(case, memory):
    memory.pipe_file(f"{FOLDER}/{MARKER}", b"\xff{")
    with pytest.raises(UsageError, match="was not written by this version"):
        _convert(case, resume=True)
    memory.pipe_file(f"{FOLDER}/{MARKER}", b'{"other": 1}')
    with pytest.raises(UsageError, match="started with another plan"):
        _convert(case, resume=True)


def test_a_marker_without_end_is_not_read(case, memory, monkeypatch):
    monkeypatch.setattr(remote_output, "_MOST_BYTES", 1 << 10)
    memory.pipe_file(f"{FOLDER}/{MARKER}", bytes(1 << 11))
    monkeypatch.setattr(Store, "get", lambda *_: pytest.fail("it was read"))
    with pytest.raises(UsageError, match="was not written by this version"):
        _convert(case, resume=True)


@pytest.mark.parametrize("again", [{"resume": True}, {}], ids=str)
def test_every_stop_of_a_replacement_leaves_the_old_or_the_new(again, case, memory, monkeypatch):
    """It is stopped before its n-th change of the store: the old one stays until the new one is whole."""
    _convert(case, 3)
    old = _content(memory)
    changes: list[tuple[str, str]] = []
    stop_at = -1

    class StoppedError(Exception):
        pass

    def watch(method: str) -> None:
        original = getattr(MemoryFileSystem, method)

        def called(self: Any, path: str, mode: str = "wb", *args: Any, **named: Any) -> Any:
            if method != "_open" or mode == "wb":
                changes.append((method, (path if method != "cp_file" else mode).removeprefix("/out/")))
                if len(changes) > stop_at >= 0:
                    raise StoppedError
            return original(self, path, *([mode] if method != "rm_file" else []), *args, **named)

        monkeypatch.setattr(MemoryFileSystem, method, called)

    watch("rm_file")
    watch("_open")
    watch("cp_file")
    quick = store_module.Retry(attempts=1, patience=1)
    monkeypatch.setattr(remote_output, "Store", lambda location: Store(location, quick))
    _convert(case, 2, overwrite=True)
    new, total = _content(memory), len(changes)
    aside = f".run.{MARKER[1:]}/"
    touched = [change for change in changes if not change[1].startswith(aside)]
    assert touched[:2] == [("_open", f"run/{MARKER}"), ("rm_file", f"run/{METADATA}")]
    assert touched[-3:] == [
        ("cp_file", f"run/{METADATA}"),
        ("rm_file", f"run/{MARKER}"),
        ("_open", "tracker"),
    ]
    whole = changes.index(("_open", f"{aside}{METADATA}"))
    for n in range(total):
        memory.store.clear()
        memory.pipe(old)
        changes.clear()
        stop_at = n
        with pytest.raises((StorageError, StoppedError)):
            _convert(case, 2, overwrite=True)
        stop_at = -1
        found = _content(memory)
        here = {path: data for path, data in found.items() if path.startswith(f"{FOLDER}/")}
        if n <= whole + 1:
            assert {**here, "/out/tracker": b"7"} == old, n
        elif f"{FOLDER}/{METADATA}" in found:
            here.pop(f"{FOLDER}/{MARKER}", None)
            assert {**here, "/out/tracker": b"7"} in (old, new), n
        else:
            assert f"/out/{aside}{METADATA}" in found, n
        _convert(case, 2, overwrite=True, **again)
        assert _content(memory) == new, n
