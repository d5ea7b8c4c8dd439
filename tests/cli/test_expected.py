"""What a new user expects to work: `--last`, `--fail-on-nan`, `--verify`, parameters by name, no `--to`."""

import shutil
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.execute.run import _Run
from tests.altered import without_numbers
from tests.conftest import DATA, fixture_dir

RUN = DATA / "core019_llama_tp2_fully_reshardable"
FSDP = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of iterations 2, 4, 10, and one that is still being written."""
    root = tmp_path_factory.mktemp("long")
    for number in (2, 4, 10, 12):
        shutil.copytree(RUN / "iter_0000002", root / f"iter_{number:07d}")
    (root / "iter_0000012" / ".metadata").unlink()
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root


def test_the_mean_of_the_last_iterations(long, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert run(["average", str(long), out, "--last", "2", "-v"]) == 0
    text = capsys.readouterr().out
    assert f"0.5 of {long}/iter_0000004" in text and f"0.5 of {long}/iter_0000010" in text
    for words in (
        [str(long), out, "--last", "4"],
        [str(RUN), str(RUN), out, "--last", "1"],
        [str(RUN), out, "--last", "0"],
    ):
        assert run(["average", *words]) == 2
    assert "--last 4: " in capsys.readouterr().err


def test_nan_can_fail_a_script(tmp_path, capsys):
    bad = str(without_numbers(RUN, tmp_path / "bad", "output_layer.weight"))
    for words in (["stats", bad], ["stats", str(RUN), "--fail-on-nan"]):
        assert run(words) == 0
        assert "no NaN and no Inf in " in capsys.readouterr().out.splitlines()[0] or words[1] == bad
    assert run(["stats", bad, "--fail-on-nan"]) == run(["stats", bad, str(RUN), "--fail-on-nan", "-q"]) == 1
    assert "NaN or Inf in 1 of 60 tensors" in "".join(capsys.readouterr())


def test_an_output_is_read_back_before_it_is_published(tmp_path, monkeypatch, capsys):
    work = _Run._work

    def and_then_a_disk_that_forgets(self: _Run, files: object) -> object:
        done = work(self, files)  # type: ignore[arg-type]
        data = self.output.data
        assert data is not None
        file = data / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-3000] + bytes(3000))
        return done

    assert run(["convert", str(RUN), str(tmp_path / "good"), "--verify", "--workers", "1"]) == 0
    assert "the output was read back and is equal" in capsys.readouterr().out
    assert run(["convert", str(RUN), "memory://first/out", "--verify"]) == 2
    monkeypatch.setattr(_Run, "_work", and_then_a_disk_that_forgets)
    assert run(["convert", str(RUN), str(tmp_path / "bad"), "--verify", "--workers", "1"]) == 6
    assert "is not what was written. Nothing was published" in capsys.readouterr().err
    assert not list((tmp_path / "bad").glob("iter_*"))


@pytest.mark.parametrize("source", [RUN, FSDP], ids=["torch_dist", "fsdp_dtensor"])
def test_a_parameter_is_printed_by_its_name(source, capsys):
    for words, shown in (
        ([], "(master): float32 [128, 32]"),
        (["--role", "exp_avg"], "(exp_avg): float32 [128, 32]"),
    ):
        assert run(["print-tensor", str(source), FC1, *words]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{FC1} {shown}") and len(out.splitlines()) < 15
    assert run(["print-tensor", str(source), FC1, "--role", "momentum"]) == 5
    assert "has no momentum, only master, exp_avg, exp_avg_sq" in capsys.readouterr().err or source == RUN
    assert run(["print-tensor", str(source), FC1, "--slice", "0, :2"]) == 0
    assert len(capsys.readouterr().out.splitlines()[1].split(",")) == 2


def test_options_of_megatron_fsdp_choose_its_format(tmp_path, capsys):
    hf = str(tmp_path / "hf")
    assert run(["export-hf", str(RUN), hf, "-q"]) == 0
    rates = ["--lr", "1e-5", "--min-lr", "1e-6", "--weight-decay", "0.1"]
    for words, made in (
        ([], "torch_dist"),
        (rates, "fsdp_dtensor"),
        ([*rates, "--gpus", "8"], "fsdp_dtensor"),
    ):
        assert run(["import-hf", hf, str(tmp_path / "out"), "--dry-run", *words]) == 0
        assert f" -> {made} for main" in capsys.readouterr().out
    assert run(["import-hf", hf, str(tmp_path / "out"), *rates, "--to", "torch_dist"]) == 2
    assert "--to fsdp_dtensor" in capsys.readouterr().err
