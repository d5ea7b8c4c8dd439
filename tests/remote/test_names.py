"""A URL is one name and never a pattern: whatever it holds, its neighbours stay as they are."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckpt_tools.cli.app import run
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.run import Output, write_checkpoint
from ckpt_tools.formats.storage.object_store import Store
from ckpt_tools.formats.storage.open_files import open_files
from tests.execute.conftest import Case, make_case
from tests.remote.s3 import Objects, s3_environment, s3_server

HOSTILE = [
    "run[12]", "run[!3]", "run*", "**", "?", "run{1,2}", "run#1", "run%20x", " run ", "läuft", "run::1",
    "simplecache::run", "-rf", "run'1", "run\\1", "run$HOME", "run;ls", "run~", "...", "run+1", "run^",
]  # fmt: skip
NEIGHBOURS = ["run1", "run2", "runx", "run", "a", "b", "run 2", "run[", "x", "run1/deep"]
PIECES = st.sampled_from([*"abr12*?[]{}!-,#%: ~+=@&;'\"\\$^ä", "run", "**", "[12]", "%20", "::", "://"])
NAMES = (
    st.lists(PIECES, min_size=1, max_size=6)
    .map("".join)
    .filter(lambda name: name.strip("/ .") and "://" not in name)
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("source") / "ckpt", scale=4)


@pytest.fixture(scope="module")
def s3() -> Iterator[Objects]:
    """The objects of a server with one bucket, `box`; the environment points at it."""
    pytest.importorskip("botocore", reason="botocore is not installed")
    pytest.importorskip("moto.server", reason="moto's server is not installed")
    with s3_server() as (host, port), pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(f"http://{host}:{port}").items():
            patch.setenv(name, value)
        objects = Objects(f"http://{host}:{port}")
        objects.make("box")
        yield objects


class Memory:
    """What fsspec's memory has, as `Objects` tells it."""

    def put(self, path: str, data: bytes) -> None:
        MemoryFileSystem().pipe_file(path, data)

    def below(self, path: str) -> dict[str, bytes]:
        fs = MemoryFileSystem()
        return {found: fs.cat_file(found, None, None) for found in fs.find(path)}


def _check(objects: Memory | Objects, url: str, root: str, name: str, case: Case) -> None:
    """Write to a hostile name, resume, replace, read and delete it: its neighbours stay."""
    mine, home = f"{root}/{name}/", Store(url)
    neighbours = {f"{root}/{n}/.metadata": b"not yours" for n in NEIGHBOURS if n != name}
    for path, data in neighbours.items():
        objects.put(path, data)
    output = Output(f"{url}/{name}")
    write_checkpoint(case.plan(2), case.files, output)
    for resume in (False, True):
        Store(f"{url}/{name}").put("stale [12]*.distcp", b"stale")
        write_checkpoint(case.plan(2), case.files, replace(output, overwrite=True, resume=resume))
    files = open_files(f"{url}/{name}")
    assert files.list() == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for file in files.list():
        assert len(files.read(file, 0, files.size(file))) == files.size(file)
    assert name in home.sizes()
    found = objects.below(root)
    assert {path: data for path, data in found.items() if not path.startswith(mine)} == neighbours
    assert sum(path.startswith(mine) for path in found) == 3
    Store(f"{url}/{name}").clear(keep=())
    assert objects.below(root) == neighbours


@pytest.mark.parametrize(
    "name", [name for name in HOSTILE if "::" not in name]
)  # which fsspec's own misplaces
def test_hostile_names_in_memory(name, case):
    try:
        _check(Memory(), "memory://names", "/names", name, case)
    finally:
        MemoryFileSystem.store.clear()


@given(name=NAMES.filter(lambda name: "::" not in name))
@example(name="run[12]")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_any_name_in_memory(name, case):
    try:
        _check(Memory(), "memory://names", "/names", name, case)
    finally:
        MemoryFileSystem.store.clear()


@pytest.mark.parametrize("name", ["run[12]", "**", "run#1", "run%20x", "run::1", "läuft 1"])
def test_hostile_names_in_s3(name, s3, case):
    _check(s3, "s3://box/names", "box/names", name, case)


@given(name=NAMES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
def test_any_name_in_s3_is_stored_listed_and_deleted_alone(name, s3):
    neighbours = {
        f"box/any/{n}": b"not yours" for n in ("run1", "run2", "a", "b", "*x", "run1/deep") if n != name
    }
    for path, data in neighbours.items():
        s3.put(path, data)
    store = Store("s3://box/any")
    store.put(name, b"mine")
    assert store.get(name) == b"mine"
    assert name in store.sizes()
    store.remove(name)
    assert s3.below("box/any") == neighbours


def test_the_command_of_the_issue(s3, tmp_path):
    from tests.conftest import fixture_dir

    source = str(fixture_dir("core019_llama_tp2_fully_reshardable") / "iter_0000002")
    others = {f"box/cli/run{n}/.metadata": b"not yours" for n in (1, 2)}
    for path, data in others.items():
        s3.put(path, data)
    for name in (".metadata", "old.distcp"):
        s3.put(f"box/cli/run[12]/iter_0000002/{name}", b"old")
    assert run(["convert", source, "s3://box/cli/run[12]", "--overwrite", "--quiet"]) == 0
    found = s3.below("box/cli")
    assert others.items() <= found.items()
    assert found["box/cli/run[12]/iter_0000002/.metadata"] != b"old"
    assert "box/cli/run[12]/iter_0000002/old.distcp" not in found


@pytest.mark.parametrize(
    "url", ["s3://b/../c", "memory://a/./b", "s3://b/x?versionId=3", "simplecache::s3://b/x"]
)
def test_what_is_not_one_name_is_refused(url):
    with pytest.raises(UsageError):
        open_files(url)


@pytest.mark.parametrize("name", ["run[12]", "run*", "**", "run?", "run{1,2}", " run ", "-rf", "run#1"])
def test_hostile_names_on_a_disk(name, tmp_path, case):
    for n in NEIGHBOURS[:4]:
        (tmp_path / n).mkdir()
        (tmp_path / n / ".metadata").write_bytes(b"not yours")
    for _ in range(2):
        write_checkpoint(case.plan(2), case.files, Output(tmp_path / name, overwrite=True))
    assert sorted(p.name for p in (tmp_path / name).iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    assert {p.name for p in tmp_path.iterdir()} == {*NEIGHBOURS[:4], name}
    assert all((tmp_path / n / ".metadata").read_bytes() == b"not yours" for n in NEIGHBOURS[:4])
