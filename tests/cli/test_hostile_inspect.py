"""`inspect HOSTILE` ends with 4, with a message and nothing else."""

import shutil

import pytest

from ckpt_tools.cli.app import run
from tests.cli.test_sinks import assert_harmless
from tests.conftest import DATA, fixture_dir

HOSTILE = sorted(path.name for path in (DATA / "hostile").glob("*.metadata"))
RUN_CONFIGS = {
    "aliases": b"model: &a [1]\n" + b"".join(b"k%d: &b%d [*a, *a]\n" % (i, i) for i in range(3)) + b"x: [*a",
    "bomb": b"a0: &a0 [1]\n"
    + b"".join(b"a%d: &a%d [%b]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 20)),
    "cycle": b"model: &a {b: *a}\n",
    "deep": b"[" * 400,
    "long": b"a: 1\n" * 300_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_metadata(name, tmp_path, capsys):
    shutil.copy(DATA / "hostile" / name, tmp_path / ".metadata")
    assert run(["inspect", str(tmp_path)]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "--unknown-classes" not in err, "no placeholder can stand in metadata"
    assert_harmless(err)


@pytest.mark.parametrize("what", RUN_CONFIGS)
def test_run_config(what, tmp_path, capsys):
    run_folder = tmp_path / "run"
    shutil.copytree(fixture_dir("core019_llama_tp2_native_fsdp_dtensor"), run_folder)
    (run_folder / "iter_0000002" / "run_config.yaml").write_bytes(RUN_CONFIGS[what])
    assert run(["inspect", str(run_folder)]) == 4
    assert "run_config.yaml: not readable YAML" in capsys.readouterr().err


def test_a_metadata_file_of_a_terabyte(tmp_path, capsys):
    with open(tmp_path / ".metadata", "wb") as file:
        file.truncate(1 << 40)
    assert run(["inspect", str(tmp_path)]) == 4
    assert "more is not read into memory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["latest_checkpointed_iteration.txt", "iter_0000002/metadata.json"])
def test_small_files_of_a_terabyte(name, tmp_path, capsys):
    shutil.copytree(DATA / "core019_llama_tp2_fully_reshardable", tmp_path / "run")
    with open(tmp_path / "run" / name, "wb") as file:
        file.truncate(1 << 40)
    assert run(["inspect", str(tmp_path / "run")]) == 4
    assert "more is not read into memory" in capsys.readouterr().err
