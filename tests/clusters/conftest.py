"""An environment for recipes: `checkpoint-inspector` of this checkout on PATH, and stand-ins for other programs."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import REPO

STAND_INS = {
    "checkpoint-inspector": f'PYTHONPATH={REPO}:$PYTHONPATH exec {sys.executable} -m ckpt_tools "$@"',
    "pip": 'printf "%s\\n" "$@" >>"$PIP_CALLS"',
    "scontrol": 'printf "%s\\n" "$*" >>"$SCONTROL_CALLS"',
}


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bin")
    for name, line in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / name).chmod(0o755)
    calls = {"PIP_CALLS": str(folder / "pip-calls"), "SCONTROL_CALLS": str(folder / "scontrol-calls")}
    return {**os.environ, **calls, "PATH": f"{folder}:{os.environ['PATH']}"}


def bash(line: str, environ: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
