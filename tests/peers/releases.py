"""Starts a program that runs under released packages."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port


def run_writer(writer: Path, releases: str, case: dict[str, Any], out: Path, seconds: int = 240) -> None:
    """Run `writer` for a case, with `releases` as PYTHONPATH; the test fails where it does not end well."""
    words = [
        sys.executable,
        "-W",
        "ignore",
        str(writer),
        json.dumps(case | {"port": free_port(), "out": str(out)}),
    ]
    env = os.environ | {"PYTHONPATH": releases, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        error = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks and their writers too
        pytest.fail(f"the release did not end in {seconds} s: {case}")
    assert process.returncode == 0, f"{case}\n{error[-4000:]}"
