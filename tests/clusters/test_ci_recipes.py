"""The CI recipes, run as a CI system runs them: the workflow's own steps, the hook by a real `git commit`."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from ckpt_tools.cli.app import run
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.torch_archive.item_reader import find_tensor
from tests.clusters.conftest import bash
from tests.conftest import DATA, LLAMA, REPO
from tests.damage import flip_bit

SCRIPTS = REPO / "example-scripts"
SOURCE = DATA / LLAMA


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("converted") / "out"
    assert run(["convert", str(SOURCE), str(output), "--quiet"]) == 0
    return output


@pytest.fixture
def damaged(converted: Path, tmp_path: Path) -> Path:
    """The conversion with one bit of a tensor flipped."""
    copy = shutil.copytree(converted, tmp_path / "damaged")
    files = LocalFiles(str(copy / "iter_0000002"))
    item = max(read_catalog(files).tensors.values(), key=lambda entry: entry.nbytes).chunks[0].item
    flip_bit(copy / "iter_0000002" / item.file, find_tensor(files, item).payload_offset)
    files.close()
    return copy


def _workflow(folder: Path, tools: Mapping[str, str], **inputs: str) -> tuple[int, str, str, Path]:
    """The workflow's `run:` steps in a checkout, with GitHub's variables: exit code, output, summary, results."""
    (folder / "example-scripts").symlink_to(SCRIPTS)
    job: dict[str, Any] = yaml.safe_load((SCRIPTS / "github-actions-inspect.yml").read_text())["jobs"][
        "inspect"
    ]
    environ = {**tools, "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    for name, text in job["env"].items():  # `${{ inputs.x || ... }}` as GitHub evaluates it when x is given
        match = re.match(r"\$\{\{ (?:inputs\.(\w+)|\w+\.\w+)", text)
        environ[name] = text if match is None else inputs.get(match[1] or "", "")
    code, output = 0, ""
    for step in job["steps"]:
        if code == 0 and "run" in step and not step["run"].startswith("pip install"):
            done = bash(step["run"], environ, folder)
            code, output = done.returncode, output + done.stdout + done.stderr
    return code, output, (folder / "summary.md").read_text(), folder / job["env"]["RESULTS"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_workflow(tmp_path, tools, converted, damaged, is_damaged):
    place = damaged if is_damaged else converted
    (tmp_path / "checkout").mkdir()
    inputs = {"checkpoint": str(place), "baseline": str(SOURCE), "verify_args": "--content"}
    code, output, summary, results = _workflow(tmp_path / "checkout", tools, **inputs)
    assert code == is_damaged, output
    assert ("::error" in output) == ("checksum" in summary) == is_damaged
    assert f"`{place}` is {'not ' * is_damaged}valid" in summary
    assert f"It {'differs from' if is_damaged else 'equals'} `{SOURCE}`" in summary
    assert json.loads((results / "verify.json").read_text())["valid"] is not is_damaged
    assert json.loads((results / "diff.json").read_text())["equal"] is not is_damaged
    assert ElementTree.parse(results / "verify.xml").getroot().tag == "testsuites"


def test_the_shell_recipe_tells_unreadable_from_different(tmp_path, tools):
    (tmp_path / "empty").mkdir()
    settings = {"CHECKPOINT": str(tmp_path / "empty"), "RESULTS": str(tmp_path / "results")}
    done = bash(f"exec {SCRIPTS / 'ci_check_checkpoint.sh'}", {**tools, **settings}, tmp_path)
    assert done.returncode == 3
    assert "cannot be read (exit code 3)" in done.stdout


def test_the_hook_refuses_to_commit_a_damaged_checkpoint(tmp_path, tools, converted, damaged):
    repo = tmp_path / "repo"
    repo.mkdir()
    who = {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(line: str) -> subprocess.CompletedProcess[str]:
        return bash(f"git {line}", {**tools, **who}, repo)

    git("init -q")
    (repo / ".git" / "hooks").mkdir(exist_ok=True)
    (repo / ".git" / "hooks" / "pre-commit").symlink_to(SCRIPTS / "pre-commit-verify-checkpoints.sh")
    shutil.copytree(converted, repo / "data with space" / "good")
    git("add .")
    assert git("commit -q -m good").returncode == 0
    shutil.copytree(damaged, repo / "bad")
    git("add .")
    refused = git("commit -q -m bad")
    assert refused.returncode != 0
    assert "checksum" in refused.stderr
    assert git("rev-list --count HEAD").stdout.strip() == "1"


def test_actions_are_pinned_by_commit():
    used = [
        line.partition("uses:")[2].strip()
        for file in (SCRIPTS / "check-checkpoint" / "action.yml", SCRIPTS / "github-actions-inspect.yml")
        for line in file.read_text().splitlines()
        if "uses:" in line
    ]
    assert len(used) == 6
    for use in used:
        assert re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}( # v\d+\.\d+\.\d+)?", use), use


def test_the_github_action(tools, tmp_path):
    action: dict[str, Any] = yaml.safe_load((SCRIPTS / "check-checkpoint" / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    given = {"checkpoint": str(SOURCE), "baseline": str(SOURCE), "packages": "botocore gcsfs"}
    inputs = {name: given.get(name, spec.get("default")) for name, spec in action["inputs"].items()}
    assert all(spec.get("required") or "default" in spec for spec in action["inputs"].values())
    summary = tmp_path / "summary.md"
    environ = {
        **tools,
        "GITHUB_ACTION_PATH": str(SCRIPTS / "check-checkpoint"),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    Path(tools["PIP_CALLS"]).unlink(missing_ok=True)
    for step in action["runs"]["steps"]:
        if "run" in step:
            assert step["shell"] == "bash"
            assert "${{" not in step["run"], "an input is never a part of a script"
            env = {
                name: inputs[value[len("${{ inputs.") : -len(" }}")]] for name, value in step["env"].items()
            }
            done = bash(step["run"], environ | env, tmp_path)
            assert done.returncode == 0, done.stderr
    checkout, *packages = Path(tools["PIP_CALLS"]).read_text().splitlines()[2:]
    assert Path(checkout).resolve() == REPO
    assert packages == ["botocore", "gcsfs"]
    assert f"It equals `{SOURCE}`" in summary.read_text()
    assert json.loads((tmp_path / "checkpoint-check" / "verify.json").read_text())["valid"] is True


def test_the_gitlab_job(tools, tmp_path):
    (name, job), *others = yaml.safe_load((SCRIPTS / "gitlab-inspect.yml").read_text()).items()
    assert (name, others) == ("check checkpoint", [])
    assert job.keys() <= {"image", "rules", "variables", "timeout", "script", "artifacts"}
    assert re.fullmatch(r"python:3\.\d+\.\d+-[\w-]+", job["image"])
    (tmp_path / "example-scripts").symlink_to(SCRIPTS)
    environ = {**tools, **job["variables"], "CHECKPOINT": str(SOURCE), "CKPT_TOOLS": "wheel"}
    done = bash("\n".join(job["script"]), environ, tmp_path)
    assert done.returncode == 0, done.stderr
    kept = [*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]]
    assert all((tmp_path / path).exists() for path in kept)


def test_the_pre_commit_hook():
    (hook,) = yaml.safe_load((REPO / ".pre-commit-hooks.yaml").read_text())
    assert hook.keys() == {"id", "name", "description", "language", "entry", "files", "require_serial"}
    assert hook["language"] == "script"
    assert os.access(REPO / hook["entry"], os.X_OK)
    files = re.compile(hook["files"])
    assert (
        files.search("a/.metadata") and files.search("a/__0_0.distcp") and files.search("model.safetensors")
    )
    assert not files.search("a/metadata.json")
