"""The CI recipes, run as a CI system runs them: the workflow's own steps, the hook by a real `git commit`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.torch_archive.item_reader import find_tensor
from tests.conftest import REPO, fixture_dir

SCRIPTS = REPO / "example-scripts"
WORKFLOW = SCRIPTS / "github-actions-inspect.yml"
SOURCE = "core019_llama_tp2_fully_reshardable"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with `checkpoint-inspector` of this checkout on PATH."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "checkpoint-inspector"
    program.write_text(f'#!/usr/bin/env bash\nPYTHONPATH={REPO} exec {sys.executable} -m ckpt_tools "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, tools: Mapping[str, str]) -> Path:
    output = tmp_path_factory.mktemp("converted") / "out"
    words = ["checkpoint-inspector", "convert", str(fixture_dir(SOURCE)), str(output), "--quiet"]
    subprocess.run(words, env=tools, check=True, capture_output=True)
    return output


@pytest.fixture
def damaged(converted: Path, tmp_path: Path) -> Path:
    """The conversion with one bit of a tensor flipped."""
    copy = tmp_path / "damaged"
    shutil.copytree(converted, copy)
    files = LocalFiles(str(copy / "iter_0000002"))
    largest = max(read_catalog(files).tensors.values(), key=lambda entry: entry.nbytes)
    item = largest.chunks[0].item
    file = copy / "iter_0000002" / item.file
    data = bytearray(file.read_bytes())
    data[find_tensor(files, item).payload_offset] ^= 1
    files.close()
    file.write_bytes(data)
    return copy


class Run:
    """The workflow's `run:` steps, in a checkout, with GitHub's variables."""

    def __init__(self, folder: Path, tools: Mapping[str, str], **inputs: str) -> None:
        (folder / "example-scripts").symlink_to(SCRIPTS)
        job: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]["inspect"]
        self.summary = folder / "summary.md"
        self.results = folder / job["env"]["RESULTS"]
        environ = {**tools, "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(self.summary)}
        environ |= {name: _expression(value, inputs) for name, value in job["env"].items()}
        self.code = 0
        self.output = ""
        for step in job["steps"]:
            if "run" in step and not step["run"].startswith("pip install"):
                done = subprocess.run(
                    ["bash", "-e", "-c", step["run"]],
                    cwd=folder,
                    env=environ,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                self.output += done.stdout + done.stderr
                self.code = done.returncode
                if self.code:
                    return


def _expression(text: str, inputs: Mapping[str, str]) -> str:
    """`${{ inputs.x || ... }}` as GitHub evaluates it when x is given."""
    match = re.match(r"\$\{\{ (?:inputs\.(\w+)|\w+\.\w+)", text)
    return text if match is None else inputs.get(match[1] or "", "")


def test_the_workflow_passes_a_good_checkpoint(
    tmp_path: Path, tools: Mapping[str, str], converted: Path
) -> None:
    run = Run(
        tmp_path, tools, checkpoint=str(converted), baseline=str(fixture_dir(SOURCE)), verify_args="--content"
    )
    assert run.code == 0, run.output
    assert f"`{converted}` is valid" in run.summary.read_text()
    assert f"It equals `{fixture_dir(SOURCE)}`" in run.summary.read_text()
    assert json.loads((run.results / "verify.json").read_text())["valid"] is True
    assert json.loads((run.results / "diff.json").read_text())["equal"] is True
    assert ElementTree.parse(run.results / "verify.xml").getroot().tag == "testsuites"
    assert "::error" not in run.output


def test_the_workflow_fails_a_damaged_checkpoint_readably(
    tmp_path: Path, tools: Mapping[str, str], damaged: Path
) -> None:
    (tmp_path / "checkout").mkdir()
    run = Run(
        tmp_path / "checkout",
        tools,
        checkpoint=str(damaged),
        baseline=str(fixture_dir(SOURCE)),
        verify_args="--content",
    )
    assert run.code == 1, run.output
    assert "::error" in run.output
    summary = run.summary.read_text()
    assert f"`{damaged}` is not valid" in summary
    assert "checksum" in summary
    assert f"It differs from `{fixture_dir(SOURCE)}`" in summary
    assert "different: 1 tensors" in summary
    assert json.loads((run.results / "verify.json").read_text())["valid"] is False
    assert json.loads((run.results / "diff.json").read_text())["equal"] is False


def test_the_shell_recipe_tells_unreadable_from_different(tmp_path: Path, tools: Mapping[str, str]) -> None:
    (tmp_path / "empty").mkdir()
    settings = {"CHECKPOINT": str(tmp_path / "empty"), "RESULTS": str(tmp_path / "results")}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "ci_check_checkpoint.sh")],
        env={**tools, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "cannot be read (exit code 3)" in done.stdout


def test_the_hook_refuses_to_commit_a_damaged_checkpoint(
    tmp_path: Path, tools: Mapping[str, str], converted: Path, damaged: Path
) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    who = {
        "GIT_AUTHOR_NAME": "t",
        "GIT_AUTHOR_EMAIL": "t@t",
        "GIT_COMMITTER_NAME": "t",
        "GIT_COMMITTER_EMAIL": "t@t",
    }

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *words], cwd=repo, env={**tools, **who}, capture_output=True, text=True, check=False
        )

    git("init", "-q")
    (repo / ".git" / "hooks").mkdir(exist_ok=True)
    (repo / ".git" / "hooks" / "pre-commit").symlink_to(SCRIPTS / "pre-commit-verify-checkpoints.sh")
    shutil.copytree(converted, repo / "data with space" / "good")
    git("add", ".")
    assert git("commit", "-q", "-m", "good").returncode == 0
    shutil.copytree(damaged, repo / "bad")
    git("add", ".")
    refused = git("commit", "-q", "-m", "bad")
    assert refused.returncode != 0
    assert "checksum" in refused.stderr
    assert git("rev-list", "--count", "HEAD").stdout.strip() == "1"
