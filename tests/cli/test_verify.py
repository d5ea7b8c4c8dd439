"""`verify`, `diff`, `preflight` and the editing commands as users type them: exit codes and every form of report."""

import json
import shutil
from xml.etree import ElementTree as Xml

import pytest

import ckpt_tools
from ckpt_tools.cli import findings
from ckpt_tools.cli.app import run
from ckpt_tools.cli.verbs.check import two_values
from ckpt_tools.commands.check import verify_checks
from ckpt_tools.errors import Interrupted, Terminated
from ckpt_tools.verify.content import manifest
from ckpt_tools.verify.report import Check, Finding, Report
from tests.conftest import DATA, LLAMA, NATIVE, fixture_dir
from tests.damage import ITERATION, copy_of, flip_bit, payload_of

NORM = "model.module.decoder.final_layernorm.weight"


@pytest.fixture
def damaged(tmp_path):
    """A copy with one flipped payload bit."""
    root = copy_of(NATIVE, tmp_path)
    path, at, _ = payload_of(root, NORM, (0,))
    flip_bit(path, at)
    return root


def test_verify_says_valid(capsys):
    assert run(["verify", str(fixture_dir(NATIVE)), "--content", "-v"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"{fixture_dir(NATIVE) / ITERATION} (fsdp_dtensor) is valid"
    assert all(name in out for name in ("tiling", "frames", "states", "groups", "checksums", "values"))
    assert err == ""


def test_verify_says_what_is_wrong_and_leaves_with_1(damaged, capsys):
    assert run(["verify", str(damaged)]) == 0
    assert "is valid; the values were not read" in capsys.readouterr().out
    assert run(["verify", str(damaged), "--content"]) == 1
    verdict, *found = capsys.readouterr().out.splitlines()
    assert verdict == f"{damaged / ITERATION} (fsdp_dtensor) is not valid: 1 error"
    assert len(found) == 1 and found[0].startswith(f"error: checksums: {NORM} [0:32]")  # -v adds the checks


def test_verify_as_json(damaged, capsys):
    assert run(["verify", str(damaged), "-q", "--content", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["format"], report["valid"]) == (1, "fsdp_dtensor", False)
    (check,) = [check for check in report["checks"] if check["errors"]]
    assert (check["name"], check["unit"], check["errors"]) == ("checksums", "records", 1)
    assert check["looked_at"] > 1000
    assert check["findings"][0]["where"] == f"{NORM} [0:32]"


def test_verify_writes_junit(damaged, tmp_path, capsys):
    assert run(["verify", str(damaged), "--content", "--junit", str(tmp_path / "out.xml")]) == 1
    suites = Xml.parse(tmp_path / "out.xml").getroot()
    assert (suites.get("tests"), suites.get("failures")) == (str(len(suites.findall("*/testcase"))), "1")
    (case,) = [case for case in suites.iter("testcase") if case.find("failure") is not None]
    assert case.get("name") == "checksums"
    assert NORM in (case.findtext("failure") or "")
    assert "not valid" in capsys.readouterr().out  # the text as well


def test_verify_annotates_github_and_markdown(damaged, capsys):
    assert run(["verify", str(damaged), "--content", "--format", "github"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"::error title=verify checksums::{NORM} [0:32]: ")
    assert lines[1] == f"::notice title=verify::{damaged / ITERATION} is not valid"
    assert run(["verify", str(damaged), "--content", "--format", "markdown"]) == 1
    text = capsys.readouterr().out
    assert "| checksums |" in text
    assert f"- **error** checksums: `{NORM} [0:32]`" in text


def test_names_and_messages_cannot_break_out_of_a_report(tmp_path):
    evil = Finding(
        "frames",
        "error",
        "a\x1b[31m::error::\r\nb",
        "x %0A <b>\n::set-output name=y::z | `c` \x00",
        "fix\x07",
    )
    report = Report("p\x1b", "dcp", (Check("frames", "items", 1, (evil,)),))
    github = findings.as_github(report, "verify")
    assert len(github.splitlines()) == 2
    assert "%250A" in github
    for text in (github, findings.as_markdown(report), findings.plain(evil)):
        assert not any(c in text for c in "\x1b\x07\x00\r")
    Xml.fromstring(findings.as_junit([report], "verify"))
    assert len(findings.as_markdown(report).splitlines()) == 7
    assert "<b>" not in findings.as_markdown(report)
    json.dumps(findings.as_json(report))


def test_a_manifest_is_written_once_and_then_checked(tmp_path, capsys):
    root, manifest = copy_of(LLAMA, tmp_path), tmp_path / "manifest.json"
    command = ["verify", str(root), "--manifest", str(manifest)]
    assert run(command) == 2  # what is to be checked is not made
    assert not manifest.exists()
    write = ["verify", str(root), "--write-manifest", str(manifest)]
    assert run(write) == 0
    assert run(write) == 2  # nor is what was written written over
    stored = json.loads(manifest.read_text())
    assert stored["schema_version"] == 1
    assert set(stored["files"]) == {".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"}
    assert run(command) == 0
    path, at, _ = payload_of(root, "decoder.final_layernorm.weight", (0,))
    flip_bit(path, at)
    capsys.readouterr()
    assert run(command) == 1
    out = capsys.readouterr().out
    assert "error: manifest: decoder.final_layernorm.weight: sha256" in out
    assert f"error: manifest: {path.name}: sha256" in out
    assert out.count("error: manifest") == 2
    assert json.loads(manifest.read_text()) == stored


def test_tensor_digests_outlive_rewriting(tmp_path):
    from hashlib import sha256

    root, out, manifest = fixture_dir(LLAMA), tmp_path / "out", tmp_path / "manifest.json"
    assert run(["verify", str(root), "--write-manifest", str(manifest)]) == 0
    assert run(["slice", str(root), str(out), "-q", "--layers", ":"]) == 0
    again = tmp_path / "again.json"
    assert run(["verify", str(out), "--write-manifest", str(again)]) == 0
    before, after = (json.loads(path.read_text()) for path in (manifest, again))
    assert before["tensors"] == after["tensors"]
    assert before["files"]["__0_0.distcp"] != after["files"]["__0_0.distcp"]
    _, _, data = payload_of(copy_of(LLAMA, tmp_path), "decoder.final_layernorm.weight", (0,))
    assert before["tensors"]["decoder.final_layernorm.weight"]["sha256"] == sha256(data).hexdigest()


def test_a_manifest_of_a_damaged_checkpoint_is_not_written(tmp_path, capsys):
    root = copy_of(LLAMA, tmp_path)
    (root / ITERATION / "__1_0.distcp").unlink()
    assert run(["verify", str(root), "--write-manifest", str(tmp_path / "m.json")]) == 1
    assert "not written" in capsys.readouterr().out
    assert not (tmp_path / "m.json").exists()
    for text in ("[]", "{", "{}", '{"schema_version": 1, "files": [], "tensors": {}}'):
        (tmp_path / "m.json").write_text(text)
        assert run(["verify", str(fixture_dir(LLAMA)), "--manifest", str(tmp_path / "m.json")]) == 2


def test_diff_exit_codes(damaged, capsys):
    good = str(fixture_dir(NATIVE))
    assert run(["compare-two-checkpoint", good, good]) == 0
    assert capsys.readouterr().out.startswith("equal (compared ")
    assert run(["diff", good, str(damaged)]) == 1
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith(NORM))
    values = [ckpt_tools.open(place)[NORM][0].item() for place in (good, damaged)]
    assert line.split() == [NORM, "1", "32", "[0]", *two_values(*values), "0"]
    assert out.startswith("different: 1 tensors (")
    assert run(["diff", good, str(damaged), "--ulp", "1"]) == 0
    assert run(["diff", good, str(damaged), "--ignore", NORM]) == 0
    assert run(["diff", good, str(damaged), "--keys", "optimizer.*"]) == 0
    assert run(["diff", good, str(damaged), "--rtol", "-1"]) == 2
    assert run(["diff", good, str(damaged / "nowhere")]) == 3
    (damaged / ITERATION / ".metadata").write_bytes(b"\x80\x02N.")
    assert run(["diff", good, str(damaged)]) == 4


def test_diff_as_json(damaged, capsys):
    assert run(["diff", str(fixture_dir(NATIVE)), str(damaged), "-q", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["equal"], report["by"]) == (1, False, "keys")
    (tensor,) = [tensor for tensor in report["tensors"] if tensor["kind"] != "equal"]
    assert (tensor["key"], tensor["different"], tensor["index"], tensor["max_ulp"]) == (NORM, 1, [0], 1)
    assert [s["different"] for s in report["summary"] if s["role"] == "weight"] == [1]


def test_preflight(capsys):
    root = str(fixture_dir(NATIVE))
    assert run(["preflight", root]) == 0
    out = capsys.readouterr().out
    assert "--use-megatron-fsdp" in out
    assert f"--load {root}" in out
    assert "launch with (main)\n  unset CUDA_DEVICE_MAX_CONNECTIONS\n  torchrun " in out
    assert run(["preflight", root, "--", "x.py", "--use-megatron-fsdp", "--use-torch-fsdp2"]) == 1
    out = capsys.readouterr().out
    assert "error: fsdp-or-fsdp2: use_torch_fsdp2 is on" in out
    assert "launch with" not in out  # only what is ready is launched
    assert run(["preflight", root, "--json", "--", "--use-torch-fsdp2"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["launch"] is None
    assert report["program"] == "main"
    sources = {check["name"]: check.get("source") for check in report["checks"]}
    assert sources["fsdp-or-fsdp2"].endswith("training/arguments.py validate_args (core-0.16 to main)")
    assert sources["warm-start"].endswith("_copy_model_params_to_main_params (core-0.18 to main)")
    assert any(f["fix"] == "drop --use-torch-fsdp2" for c in report["checks"] for f in c["findings"])


def test_a_manifest_is_as_private_as_the_checkpoint(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    for folder in (root, *root.glob("iter_*")):
        folder.chmod(0o700)
    assert run(["verify", str(root), "--write-manifest", str(tmp_path / "m.json")]) == 0
    assert (tmp_path / "m.json").stat().st_mode & 0o077 == 0


def test_a_manifest_without_end_is_not_read_into_memory(monkeypatch, capsys):
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 1 << 20)
    assert run(["verify", str(fixture_dir(LLAMA)), "--manifest", "/dev/zero"]) == 2
    assert "/dev/zero is not a manifest (it has more than 1,048,576 bytes)" in capsys.readouterr().err


def test_every_iteration_of_a_run(tmp_path, capsys):
    """Each is judged, the worst counts; what a job still writes is passed over, and nothing is said of newer ones."""
    root = tmp_path / "run"
    for number in (2, 10, 100):
        shutil.copytree(DATA / LLAMA / ITERATION, root / f"iter_{number:07d}")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    (root / "iter_0000100" / ".metadata").unlink()
    words = ["verify", str(root), "--iteration", "all"]
    assert run(words) == 1  # the folders 10 and 100 hold iteration 2
    out, err = capsys.readouterr()
    assert "note: skipping iteration 100" in err
    assert f"{root}/iter_0000002 (torch_dist) is valid" in out
    assert f"{root}/iter_0000010 (torch_dist) is not valid: 1 error;" in out
    assert "it is newer" not in out
    assert run([*words, "--json", "-q"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [one["valid"] for one in report["reports"]] == [True, False]
    shutil.rmtree(root / "iter_0000010")
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    assert run([*words, "-q"]) == 0
    assert run([*words, "-q", "--write-manifest", str(tmp_path / "sums.json")]) == 2
    for wrong in ("2,10", "-1", "latest"):
        assert run(["verify", str(root), "--iteration", wrong]) == 2
    assert run(["verify", str(root / ITERATION), "--iteration", "all"]) == 2
    assert "is one checkpoint, not a run's root" in capsys.readouterr().err
    shutil.rmtree(root / ITERATION)
    assert run(words) == 3
    assert "has no iteration that its job has finished" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["iter_0000001", "iter_0000006"])
def test_a_file_that_is_named_as_an_iteration(name, tmp_path, capsys):
    """It is one finding, whether it would be the newest or not, and the others are verified."""
    root = shutil.copytree(DATA / LLAMA, tmp_path / "run")
    (root / name).touch()
    assert run(["verify", str(root), "--iteration", "all", "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)["reports"]
    assert {one["checkpoint"]: one["valid"] for one in reports} == {
        f"{root}/{name}": False,
        f"{root}/{ITERATION}": True,
    }


@pytest.mark.parametrize("stop", [Interrupted, Terminated])
def test_a_stopped_proof_is_no_finding(stop, monkeypatch):
    """Ctrl-C reaches workers first, and comes from them as an error: of no checkpoint."""

    def stopped(*_: object) -> None:
        raise stop("in a worker")

    monkeypatch.setattr(verify_checks, "compare_all_masters", stopped)
    with pytest.raises(stop):
        ckpt_tools.verify_checkpoint(DATA / LLAMA, None, ckpt_tools.VerifyOptions(content=True))


def test_every_iteration_of_several_runs(tmp_path, capsys):
    roots = [str(DATA / LLAMA), str(fixture_dir("core019_moe_ep2_fully_reshardable"))]
    assert run(["verify", *roots, "--iteration", "all", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["checkpoint"] for one in report["reports"]] == [f"{root}/{ITERATION}" for root in roots]
