"""`--hard-link`: the same checkpoint as without it, in which every tensor is where the source has it."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools.cli.app import run
from ckpt_tools.errors import StorageError
from ckpt_tools.execute.output.journal import Journal
from ckpt_tools.execute.output.local_output import LocalOutput
from tests.commands import oracle
from tests.commands.made import fsdp
from tests.commands.rewritten import saved
from tests.commands.test_repair import as_nvidias_converter_writes, parts
from tests.conftest import fixture_dir
from tests.damage import flip_bit, payload_of
from tests.folders import content, is_sound

RUN = "core019_llama_tp2_fully_reshardable"
MOE = "core019_moe_ep2_fully_reshardable"
NATIVE = "core019_llama_tp2_native_fsdp_dtensor"
REFUSED = {
    errno.EXDEV: "different file systems",
    errno.EPERM: "protected_hardlinks",
    errno.EMLINK: "as many links",
    errno.EIO: "Input/output error",
}


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run's root whose files may get links, and be changed."""
    folder = tmp_path / "source"
    shutil.copytree(fixture_dir(request.param if hasattr(request, "param") else NATIVE), folder)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*words, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def assert_linked(source: Path, linked: Path, copied: Path) -> set[str]:
    """`linked` is `copied` in files of `source`, whose names are given."""
    oracle.assert_same(linked, copied)
    assert oracle.objects(linked) == oracle.objects(copied)
    known, as_copied = oracle.metadata(linked), oracle.metadata(copied)
    assert known.planner_data == as_copied.planner_data
    assert list(known.state_dict_metadata) == list(as_copied.state_dict_metadata)
    files = {info.relative_path for info in known.storage_data.values()}
    assert files <= inodes(linked).keys()
    shared = {name for name, inode in inodes(linked).items() if inodes(source).get(name) == inode}
    tensors = {key for key, meta in known.state_dict_metadata.items() if hasattr(meta, "chunks")}
    assert {
        info.relative_path for index, info in known.storage_data.items() if index.fqn in tensors
    } == shared
    assert len(inodes(linked).keys() - shared - inodes(copied).keys()) <= 1  # what changed is in one file
    return shared


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (NATIVE, ["strip"]),
        (NATIVE, ["modify-state-dict", "--op", "remove rng_state", "--op", "rename ^args$ arguments"]),
        (NATIVE, ["modify-state-dict", "--op", r"rename model\.module\.(.*) model.lang.\1"]),
        (NATIVE, ["convert", "--tp", "2"]),
        (NATIVE, ["convert", "--gpus", "4", "--tp", "2"]),
        (RUN, ["strip", "--check-masters", "all"]),
        (RUN, ["modify-state-dict", "--op", "remove ^rng"]),
        (MOE, ["strip", "--verify", "--fsync"]),
        ("core016_llama_tp2_dp_reshardable", ["modify-state-dict", "--op", "remove ^rng"]),
    ],
    indirect=["source"],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_the_output_is_the_same_in_files_of_the_source(source, words, tmp_path, capsys):
    verb, *options = words
    before = content(source)
    assert run([verb, str(source), str(tmp_path / "copied"), *options]) == 0
    report = told([verb, str(source), str(tmp_path / "linked"), *options, "--hard-link"], capsys)
    linked, copied = (oracle.files_of(tmp_path / name) for name in ("linked", "copied"))
    shared = assert_linked(oracle.files_of(source), linked, copied)
    assert content(source) == before
    assert is_sound(linked) == is_sound(copied)

    links, new = report.get("plan", report), report.get("written", report)
    assert links["linked_files"] == {name: (linked / name).stat().st_size for name in shared}
    items = {
        (info.relative_path, info.offset): info.length
        for info in oracle.metadata(linked).storage_data.values()
        if info.relative_path in shared
    }
    assert links["bytes_unreferenced"] == sum(links["linked_files"].values()) - sum(items.values())
    assert new["bytes_written"] == sum(
        path.stat().st_size for path in linked.glob("*.distcp") if path.name not in shared
    )
    assert new["payloads_proven"] > 0  # linked, and read all the same
    unread = told(
        [verb, str(source), str(tmp_path / "unread"), *options, "--hard-link", "--check-source", "none"],
        capsys,
    )
    assert unread.get("written", unread)["payloads_proven"] == 0
    assert content(tmp_path / "unread") == content(tmp_path / "linked")


def test_layers_that_are_whole_and_masters_that_are_moved(tmp_path):
    """`slice` and `repair`, which have other sources."""
    whole = fsdp(RUN)
    tensors, objects = as_nvidias_converter_writes(*parts(whole))
    broken = saved(tmp_path / "broken", tensors | objects)
    for words in (["slice", str(whole), "--layers", "0:1"], ["repair", str(broken)]):
        verb, source, *options = words
        for name, more in (("linked", ["--hard-link"]), ("copied", [])):
            assert run([verb, source, str(tmp_path / verb / name), *options, *more]) == 0
        linked, copied = (oracle.files_of(tmp_path / verb / name) for name in ("linked", "copied"))
        assert assert_linked(oracle.files_of(Path(source)), linked, copied)
        assert is_sound(linked)


@pytest.mark.parametrize("source", [RUN, NATIVE], indirect=True)
def test_copies_of_a_run(source, tmp_path, capsys):
    out = tmp_path / "out"
    report = told(["copy", str(source), str(out), "--iteration", "all", "--read-back", "--hard-link"], capsys)
    assert content(out) == {
        name: data for name, data in content(source).items() if name.startswith(("iter", "latest"))
    }
    own, theirs = inodes(oracle.files_of(source)), inodes(oracle.files_of(out))
    data = {name for name in own if name.endswith(".distcp")}
    assert {
        name for name in own if own[name] == theirs[name]
    } == data  # `.metadata` and small files are edited
    assert report["copied"][0]["linked_files"].keys() == data
    assert report["copied"][0]["payloads_proven"] > 0


def test_a_copy_of_a_hugging_face_model_in_a_cache(tmp_path):
    """There data files are links to blobs: what gets a name is the blob."""
    blobs, model = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    model.mkdir(parents=True)
    save_file({"model.norm.weight": torch.ones(9)}, blobs / "abc")
    (model / "model.safetensors").symlink_to("../../blobs/abc")
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "tokenizer.json").write_bytes(b'"' + b"a" * (2 << 20) + b'"')
    assert run(["copy", str(model), str(tmp_path / "out"), "--hard-link"]) == 0
    made = {path.name: path.lstat() for path in (tmp_path / "out").iterdir()}
    assert made.keys() == {"model.safetensors", "config.json", "tokenizer.json"}
    assert made["model.safetensors"].st_ino == (blobs / "abc").stat().st_ino
    assert made["tokenizer.json"].st_nlink == 1


@pytest.mark.parametrize(
    ("source", "words", "why"),
    [
        (NATIVE, ["strip", "--dtype", "bfloat16"], "float32 is cast to bfloat16"),
        (NATIVE, ["strip", "--fresh-optimizer"], "it is not stored as a tensor, but computed"),
        (NATIVE, ["convert", "--to", "torch_dist"], "it is cut from what is stored, or joined of it"),
        (RUN, ["convert"], "decoder.layers.0.self_attention.linear_proj.weight"),
        (RUN, ["slice", "--layers", "0:1"], "it is cut from what is stored"),
    ],
    indirect=["source"],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_what_would_change_a_data_file_is_refused_by_name(source, words, why, more, tmp_path, capsys):
    verb, *options = words
    assert run([verb, str(source), str(tmp_path / "out"), *options, *more, "--hard-link"]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert "Leave it out, and they are copied" in said
    assert not (tmp_path / "out").exists()


def test_where_there_are_no_links(source, tmp_path, capsys):
    for places in ([str(source), "memory://out"], ["memory://source", str(tmp_path / "out")]):
        if places[0].startswith("memory"):
            assert run(["copy", str(oracle.files_of(source)), places[0]]) == 0
        assert run(["copy", *places, "--hard-link"]) == 2
        assert "--hard-link: " in capsys.readouterr().err
    assert run(["strip", str(source), str(source / "iter_0000002"), "--overwrite", "--hard-link"]) == 2


@pytest.mark.parametrize("code", REFUSED)
def test_a_link_that_is_refused_leaves_nothing(code, source, tmp_path, capsys, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    before = sorted(tmp_path.rglob("*"))
    assert run(["strip", str(source), str(tmp_path / "made" / "out"), "--hard-link"]) == 7
    said = capsys.readouterr().err
    assert REFUSED[code] in said
    assert "Leave out --hard-link" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_another_file_system_is_seen_before_anything_is_made(source, capsys):
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == source.stat().st_dev:
        pytest.skip("no other file system here")
    assert run(["strip", str(source), str(shm / "ckpt_tools-links"), "--hard-link", "--dry-run"]) == 7
    assert REFUSED[errno.EXDEV] in capsys.readouterr().err


def test_damage_is_found_in_what_is_linked(source, tmp_path):
    key = "model.module.decoder.final_layernorm.weight"
    file, start, _ = payload_of(source, key, (0,))
    flip_bit(file, start)
    words = ["strip", str(source), str(tmp_path / "out"), "--hard-link"]
    assert run(words) == 4
    assert not (tmp_path / "out").exists()
    assert file.stat().st_nlink == 1
    assert run([*words, "--check-source", "none"]) == 0


def test_a_source_that_changes_meanwhile_is_seen(source, tmp_path, monkeypatch, capsys):
    stock = LocalOutput.work

    def disturbed(*args: Any) -> Any:
        file = oracle.files_of(source) / "__1_0.distcp"
        os.utime(file, ns=(0, file.stat().st_mtime_ns))  # as a program that restores it
        return stock(*args)

    words = ["strip", str(source), str(tmp_path / "out"), "--overwrite"]
    for more in ([], ["--hard-link"], ["--hard-link", "--check-source", "none"]):
        for has_links_to_remove in (False, True):
            if has_links_to_remove:
                stopped(monkeypatch, [*words, "--hard-link"], "work")
            with monkeypatch.context() as patched:
                patched.setattr(LocalOutput, "work", disturbed)
                assert run([*words, *more]) == 4
            assert "__1_0.distcp changed while the conversion ran" in capsys.readouterr().err
            assert not [*(tmp_path / "out").glob("*")]


@pytest.mark.parametrize("replace", [True, False])
def test_a_source_that_is_replaced_or_removed_before_it_is_linked(
    replace, source, tmp_path, monkeypatch, capsys
):
    stock = os.link

    def disturbed(*args: Any, **more: Any) -> None:
        file = oracle.files_of(source) / "__0_0.distcp"
        shutil.copy2(file, tmp_path / "aside")
        file.unlink()
        if replace:
            (tmp_path / "aside").rename(file)
        stock(*args, **more)

    monkeypatch.setattr(os, "link", disturbed)
    assert run(["strip", str(source), str(tmp_path / "out"), "--hard-link"]) == 4
    assert "__0_0.distcp changed while the conversion ran" in capsys.readouterr().err


def stopped(monkeypatch: pytest.MonkeyPatch, words: list[str], step: str, of: type = LocalOutput) -> None:
    def stop(*_: object, **__: object) -> None:
        raise StorageError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(of, step, stop)
        assert run(words) == 7


@pytest.mark.parametrize("step", ["work", "put_in_place", "write_beside", "finish"])
def test_a_later_run_goes_on(step, source, tmp_path, monkeypatch):
    words = ["strip", str(source), str(tmp_path / "out"), "--hard-link"]
    stopped(monkeypatch, words, step)
    if step == "work":
        for file in oracle.files_of(source).glob(
            "*.distcp"
        ):  # restored meanwhile: the link is to the old one
            shutil.copy2(file, tmp_path / "aside")
            (tmp_path / "aside").replace(file)
        assert run(words[:-1]) == 2  # a copy is another plan
        assert run([*words[:-1], "--resume"]) == 2
    assert run([*words, "--resume"]) == 0
    assert inodes(oracle.files_of(source)).items() & inodes(oracle.files_of(tmp_path / "out")).items()
    assert is_sound(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("killed_at", [("work", LocalOutput), ("begin", Journal)])
@pytest.mark.parametrize("more", [[], ["--hard-link"]])
@pytest.mark.parametrize("is_stopped_again", [False, True])
def test_to_remove_links_of_a_killed_run_is_no_change_of_the_source(
    killed_at, more, is_stopped_again, source, tmp_path, monkeypatch
):
    words = ["strip", str(source), str(tmp_path / "out")]
    with monkeypatch.context() as killed:
        killed.setattr(LocalOutput, "leave", lambda *_: None)
        stopped(killed, [*words, "--hard-link"], *killed_at)
    file = oracle.files_of(source) / "__0_0.distcp"
    assert file.stat().st_nlink == 2
    if is_stopped_again:  # what this one notes of the source is of after
        stopped(monkeypatch, [*words, *more, "--overwrite"], "work")
    assert run([*words, *more, "--overwrite", *(["--resume"] if is_stopped_again else [])]) == 0
    assert file.stat().st_nlink == 1 + ("--hard-link" in more)


def test_only_links_are_taken_for_a_finished_output(source, tmp_path, capsys):
    words = ["strip", str(source), str(tmp_path / "out"), "--hard-link"]
    assert run(words) == 0
    assert run([*words, "--resume"]) == 0
    assert "complete already" in capsys.readouterr().out
    shared = next(oracle.files_of(tmp_path / "out").glob("__0_0.distcp"))
    shutil.copy(shared, tmp_path / "aside")
    (tmp_path / "aside").replace(shared)
    assert run([*words, "--resume"]) == 2
    assert run([*words, "--overwrite"]) == 0
    assert shared.stat().st_nlink == 2


@pytest.mark.parametrize("verb", [["strip"], ["modify-state-dict", "--op", "remove rng_state"]])
def test_replacing_one_leaves_the_other_as_it_is(verb, source, tmp_path):
    linked = tmp_path / "linked"
    assert run(["copy", str(source), str(linked), "--hard-link"]) == 0
    before = content(source)
    other = fixture_dir(NATIVE)
    assert run([verb[0], str(other), str(linked), *verb[1:], "--overwrite"]) == 0
    assert content(source) == before
    assert run(["copy", str(source), str(linked), "--hard-link", "--overwrite"]) == 0
    kept = content(linked)
    assert run([verb[0], str(other), str(source), *verb[1:], "--overwrite"]) == 0
    assert content(linked) == kept
    assert all(path.stat().st_nlink == 1 for path in source.rglob("*") if path.is_file())


def test_a_full_disk_has_room_for_links(source, tmp_path, monkeypatch):
    stock: Callable[[int], os.statvfs_result] = os.statvfs

    def nearly_full(at: int) -> os.statvfs_result:
        return os.statvfs_result((*stock(at)[:4], (1 << 20) // stock(at).f_frsize, *stock(at)[5:]))

    monkeypatch.setattr(os, "statvfs", nearly_full)
    words = ["strip", str(source), str(tmp_path / "out")]
    with (oracle.files_of(source) / "__0_0.distcp").open("ab") as file:
        file.truncate(8 << 20)
    assert run(["copy", str(source), str(tmp_path / "out")]) == 7
    assert run([*words, "--hard-link"]) == 0
