"""`verify` of a Hugging Face folder: whatever a loader reads first of it is a finding when it cannot be read."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tools.cli.app import run
from ckpt_tools.commands.verify import VerifyOptions, verify_checkpoint
from tests.cases import user_cases as user_cases  # noqa: PLC0414  a fixture

ONE, TWO, INDEX = "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
JSON = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound model in two files."""
    save_file({"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}, tmp_path / ONE)
    save_file({"c": np.ones(4, np.float32)}, tmp_path / TWO)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": ONE, "b": ONE, "c": TWO}}))
    for name in JSON:
        (tmp_path / name).write_text('{"model_type": "llama"}')
    (tmp_path / "eval.json").write_text("of somebody else's program")
    return tmp_path


def errors(model: Path) -> str:
    found = verify_checkpoint(model).findings
    return "\n".join(f"{one.severity} {one.check} {one.where}: {one.message}" for one in found)


def test_a_sound_model_has_no_finding(model: Path) -> None:
    assert errors(model) == ""
    checks = {check.name: check.looked_at for check in verify_checkpoint(model).checks}
    assert checks["model"] == len(JSON)


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize(("text", "told"), [
    ("{", "it is not JSON"), ("", "it is not JSON"), ("\udcff", "it is not JSON"), ("[1]", "no object: list"),
    ("null", "no object: NoneType"), ("[" * 100_000, "nested too deep"), (POINTER, "Git LFS pointer"),
])  # fmt: skip
def test_a_settings_file_that_cannot_be_read_is_an_error(
    model: Path, name: str, text: str, told: str
) -> None:
    (model / name).write_text(text, errors="surrogateescape")
    found = errors(model)
    assert (
        found.startswith(f"error model {name}: ") and told in found and run(["verify", str(model), "-q"]) == 1
    )


def test_an_empty_config_and_none_are_findings(model: Path) -> None:
    (model / "config.json").write_text("{}")
    assert errors(model).startswith("error model config.json: it is an empty object")
    (model / "config.json").unlink()
    assert errors(model).startswith("warning model config.json: there is none")
    (model / "generation_config.json").unlink()
    assert "generation_config" not in errors(model)


def index(model: Path, **places: object) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": ONE, "b": ONE, "c": TWO} | places}))


def empty(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_bytes(struct.pack("<Q", 2) + b"{}")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "index not JSON": (lambda m: (m / INDEX).write_text("{"), "not a safetensors index"),
    "index a list": (lambda m: (m / INDEX).write_text("[]"), "not a safetensors index"),
    "index empty": (lambda m: (m / INDEX).write_text(""), "not a safetensors index"),
    "no weight_map": (lambda m: (m / INDEX).write_text("{}"), "not a safetensors index"),
    "weight_map a list": (lambda m: (m / INDEX).write_text('{"weight_map": []}'), "weight_map is not a map"),
    "absent file": (lambda m: index(m, d="model-3.safetensors"), "shard model-3.safetensors is missing"),
    "file elsewhere": (lambda m: index(m, d="../x.safetensors"), "is not a file name"),
    "absent tensor": (lambda m: index(m, d=TWO), f"{TWO} lacks d, which the index places there"),
    "in another file": (lambda m: index(m, a=TWO), f"{ONE} holds a, which the index places in {TWO}"),
    "in two files": (lambda m: save_file({n: np.ones(4, np.float32) for n in "ac"}, m / TWO),
                     f"{TWO} holds a, which the index places in {ONE}"),
    "named twice": (lambda m: (m / INDEX).write_text(f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}'),
                    "duplicate name 'a'"),
    "nothing named": (lambda m: (m / INDEX).write_text('{"weight_map": {}}'), "hold no tensor at all"),
    "nothing in one": (empty(TWO), f"{TWO} lacks c, which the index places there"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_an_index_that_is_not_that_of_the_files_is_an_error(model: Path, case: str) -> None:
    damage, told = DAMAGE[case]
    damage(model)
    assert told in errors(model) and "error" in errors(model)
    assert run(["verify", str(model), "-q"]) == 1


def test_a_single_file_without_tensors_is_no_model(model: Path) -> None:
    for name in (ONE, TWO, INDEX):
        (model / name).unlink()
    empty("model.safetensors")(model)
    assert "hold no tensor at all" in errors(model)


def test_a_file_that_the_index_does_not_name_is_a_warning(model: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, model / "consolidated.safetensors")
    assert errors(model).startswith("warning files consolidated.safetensors: no item lies in this file")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("harm", "errors"),
    [
        (lambda folder: None, 0),
        (lambda folder: cut(folder / "iter_0000020" / "__0_0.distcp"), 1),
        (lambda folder: (folder / "iter_0000020" / ".metadata").unlink(), 1),
        (lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("30"), 1),
        (lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("?"), 1),
        (lambda folder: cut(folder / "model.safetensors"), 1),
        (
            lambda folder: (folder / "iter_0000020" / "metadata.json").write_text(
                '{"sharded_backend": "zarr"}'
            ),
            0,
        ),
    ],
)
@pytest.mark.parametrize("content", [False, True])
def test_both_of_a_folder_that_holds_the_model_twice_are_checked(
    harm: Callable[[Path], object], errors: int, content: bool, user_cases: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-20"
    shutil.copytree(user_cases / "swift_checkpoint_folder" / "checkpoint-20", folder)
    harm(folder)
    report = verify_checkpoint(folder, options=VerifyOptions(content=content))
    assert report.is_valid == (errors == 0)
    assert any(f.check == "other copy" for f in report.findings)


def test_a_model_in_an_iterations_folder_is_checked(user_cases: Path, tmp_path: Path) -> None:
    swift = user_cases / "swift_checkpoint_folder" / "checkpoint-20"
    for place in ("", "hf"):
        folder = tmp_path / f"run{place}" / "iter_0000020"
        shutil.copytree(swift / "iter_0000020", folder)
        (folder / place).mkdir(exist_ok=True)
        for name in ("model.safetensors", "config.json"):
            shutil.copy(swift / name, folder / place)
        assert verify_checkpoint(folder).is_valid
        cut(folder / place / "model.safetensors")
        assert not verify_checkpoint(folder).is_valid
