"""Tests that need transformers, under its released versions: 4 and 5 write other files and load them otherwise."""

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
@pytest.mark.parametrize(
    ("version", "tests"),
    [
        ("4.57.6", "test_families.py"),
        ("5.24.0", "test_families.py"),
        ("5.24.0", "test_quantized_peers.py"),
        ("5.24.0", "test_peft_peers.py"),
        ("4.57.6", "test_towers_peers.py"),
        ("5.24.0", "test_towers_peers.py"),
        ("4.57.6", "test_texts_peers.py"),
        ("5.24.0", "test_texts_peers.py"),
    ],
)
def test_under_a_release(version: str, tests: str) -> None:
    folder = PEERS / f"transformers-{version}"
    if not folder.is_dir():
        pytest.skip(f"CKPT_TOOLS_PEERS has no transformers-{version}")
    arguments = [
        f"tests/megatron/huggingface/{tests}",
        "-o",
        "addopts=--strict-markers",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", *arguments],
        cwd=REPO, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout[-500:]
