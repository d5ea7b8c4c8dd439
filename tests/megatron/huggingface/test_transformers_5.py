"""`test_families.py` once more under transformers 5, whose classes write and read other files than those of 4."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

TRANSFORMERS = Path(os.environ.get("CKPT_TOOLS_PEERS", "")) / "transformers-5.24.0"


@pytest.mark.peer
@pytest.mark.skipif(not TRANSFORMERS.is_dir(), reason="CKPT_TOOLS_PEERS has no transformers-5.24.0")
def test_every_family_under_transformers_5() -> None:
    tests = [
        "tests/megatron/huggingface/test_families.py",
        "-o",
        "addopts=--strict-markers",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", *tests],
        cwd=REPO, env={**os.environ, "PYTHONPATH": str(TRANSFORMERS)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]
