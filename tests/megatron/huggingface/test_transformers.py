"""`test_families.py` under released versions of transformers: 4 and 5 write other files and load them otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

PEERS = Path(os.environ.get("CKPT_TOOLS_PEERS", ""))


@pytest.mark.peer
@pytest.mark.parametrize("version", ["4.57.6", "5.24.0"])
def test_every_family(version: str) -> None:
    folder = PEERS / f"transformers-{version}"
    if not folder.is_dir():
        pytest.skip(f"CKPT_TOOLS_PEERS has no transformers-{version}")
    tests = [
        "tests/megatron/huggingface/test_families.py",
        "-o",
        "addopts=--strict-markers",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", *tests],
        cwd=REPO, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout[-500:]
