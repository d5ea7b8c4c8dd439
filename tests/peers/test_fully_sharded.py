"""What two FSDP2 ranks of released transformers save is, exported, what `from_pretrained` loads: byte for byte.

`tests/peers/run` installs the releases; without them these tests are skipped.
"""

from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from tests.peers.releases import run_writer
from tests.peers.test_optimizer_layouts import PEERS

WRITER = Path(__file__).with_name("fully_sharded.py")


@pytest.mark.peer
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("release", ["transformers-4.57.6", "transformers-5.24.0"])
def test_transformers_loads_what_its_ranks_have_saved(release, tied, dtype, tmp_path):
    if not (PEERS / release).is_dir():
        pytest.skip(f"{release} is not in CKPT_TOOLS_PEERS (tests/peers/run installs it)")
    case = {"tied": tied, "dtype": dtype, "load": False}
    run_writer(WRITER, str(PEERS / release), case, tmp_path)
    words = [
        "export-hf",
        str(tmp_path / "dcp"),
        str(tmp_path / "hf_out"),
        "--hf-config",
        str(tmp_path / "hf"),
    ]
    assert run(words) == 0
    run_writer(WRITER, str(PEERS / release), case | {"load": True}, tmp_path)
