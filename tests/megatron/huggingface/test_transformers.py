"""Tests that need transformers, under its released versions: 4 and 5 write other files and load them otherwise."""

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
        *(("4.57.6", f"test_{name}.py") for name in ("families", "towers_peers", "texts_peers")),
        *(
            ("5.24.0", f"test_{name}.py")
            for name in ("families", "towers_peers", "texts_peers", "quantized_peers", "peft_peers")
        ),
    ],
)
def test_under_a_release(version, tests):
    folder = PEERS / f"transformers-{version}"
    if not folder.is_dir():
        pytest.skip(f"CKPT_TOOLS_PEERS has no transformers-{version}")
    words = (
        f"-m pytest -q -rs tests/megatron/huggingface/{tests} -o addopts=--strict-markers -p no:cacheprovider"
    )
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=REPO, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout[-500:]
