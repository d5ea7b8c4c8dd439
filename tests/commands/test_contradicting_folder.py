"""A folder whose number is not the iteration stored in it: commands say which counts for what."""

import shlex
import shutil
import warnings

import pytest

import ckpt_tools
from ckpt_tools.cli.app import run
from ckpt_tools.formats.locate.detect import TRACKER, locate
from tests.conftest import DATA, FSDP

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
WRITERS = [
    "convert {run} {out}", "convert {run} {out} --to torch_dist --target core-0.19",
    "convert {run} {out} --to dcp", "convert {run} {out} --iteration all", "convert {fsdp} {out} --gpus 4",
    "convert {fsdp} {out} --to torch_dist", "convert-torch-dist-to-fsdp-dtensor {run} {out}",
    "export-hf {run} {out}", "copy {run} {out}", "copy {run} {out} --iteration all", "strip {run} {out}",
    "slice {run} {out} --layers 0:1", "average {run} {run} {out}",
    "modify-state-dict {run} {out} --op 'remove rng_state.*'",
]  # fmt: skip
READERS = [
    "inspect {run}", "diff {run} {fsdp}", "plan {run} --gpus 4", "stats {run}",
    "print-tensor {run} decoder.final_layernorm.weight", "preflight {fsdp}", "repair {fsdp} {out}",
    "build-param-group-map {run}",
]  # fmt: skip


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Iteration 2 under the number 9, with a tracker that names it so."""
    places = {}
    for name, original in (("run", LLAMA), ("fsdp", FSDP)):
        root = tmp_path_factory.mktemp(name)
        shutil.copytree(original / "iter_0000002", root / "iter_0000009")
        (root / TRACKER).write_text("9")
        places[name] = str(root)
    return places


@pytest.mark.parametrize("words", [*WRITERS, *READERS])
def test_it_is_said_once_a_checkpoint(words, renamed, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(shlex.split(words.format(out=out, **renamed))) in (0, 1)
    said = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]
    assert len(said) == ("{run}" in words) + ("{fsdp}" in words)
    for line in said:
        assert "iter_0000009: the folder says iteration 9, the state in it 2." in line
        assert "gets the number 9 too, but a job that loads it resumes from iteration 2" in line
        assert "rename the folder to iter_0000002" in line
    if words in WRITERS and not words.startswith("export"):  # as was said
        made = locate(str(out))
        assert made.iteration == 9
        assert (out / TRACKER).read_text() == "9"
        with warnings.catch_warnings(record=True) as again:
            warnings.simplefilter("always")
            with ckpt_tools.open(str(out)) as checkpoint:
                assert checkpoint.iteration == 9
            assert len(again) == 1


def test_no_name_is_proposed_that_is_taken(renamed, tmp_path, capsys):
    root = shutil.copytree(renamed["run"], tmp_path / "run")
    assert run(["verify", str(root)]) == 1
    assert "Fix: if 2 is right, rename the folder to iter_0000002" in capsys.readouterr().out
    shutil.copytree(root / "iter_0000009", root / "iter_0000002")
    assert run(["verify", str(root)]) == 1
    assert run(["inspect", str(root)]) == 0
    for said in capsys.readouterr():
        assert "Fix: find out which of the two is iteration 2: there is a folder iter_0000002 already" in said
        assert "rename" not in said


def test_quiet_keeps_it_quiet(renamed, tmp_path, capsys):
    assert run(["convert", renamed["run"], str(tmp_path / "out"), "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_the_library_warns(renamed):
    with pytest.warns(UserWarning, match="the folder says iteration 9, the state in it 2"):
        ckpt_tools.inspect_checkpoint(renamed["run"])


@pytest.mark.parametrize("name", ["iter_0000002", "release", "somewhere"])
def test_nothing_is_said_where_nothing_contradicts(name, tmp_path, capsys):
    shutil.copytree(LLAMA / "iter_0000002", tmp_path / name)
    assert run(["inspect", str(tmp_path / name)]) == 0
    assert capsys.readouterr().err == ""


def test_a_state_that_cannot_be_read_is_copied(tmp_path, capsys):
    from tests.damage import copy_of

    root = copy_of("core019_llama_tp2_fully_reshardable", tmp_path / "run")
    assert run(["copy", str(root), str(tmp_path / "out")]) == 0
    (root / "iter_0000002" / "common.pt").write_bytes(b"no pickle")
    assert run(["copy", str(root), str(tmp_path / "again"), "-q"]) == 0
    assert (tmp_path / "again/iter_0000002/common.pt").read_bytes() == b"no pickle"
