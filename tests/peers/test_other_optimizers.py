"""Jobs of other optimizers: saved by megatron-core 0.16.1, converted there and back, loaded by it again."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor
from ckpt_tools.commands.convert.to_torch_dist import convert_to_torch_dist
from tests.commands.oracle import files_of
from tests.peers.releases import run_writer

RELEASE = Path(os.environ.get("CKPT_TOOLS_PEERS", "absent"), "megatron_core-0.16.1")
WRITER = Path(__file__).with_name("other_optimizers.py")
# optimizer, tp, dp, ep, experts
CASES = [
    ("sgd", 1, 2, 1, 0),
    ("sgd_plain", 1, 1, 1, 0),
    ("muon", 2, 1, 1, 0),
    ("muon", 1, 2, 2, 4),
    ("dist_muon", 1, 2, 1, 0),
    ("offloaded_adam", 1, 2, 1, 0),
]


@pytest.mark.peer
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-tp{case[1]}-dp{case[2]}-ep{case[3]}")
def test_another_layout_of_it_loads_with_every_state(case, tmp_path):
    if not RELEASE.is_dir():
        pytest.skip("megatron-core 0.16.1 is not in CKPT_TOOLS_PEERS (tests/peers/run installs it)")
    settings = dict(zip(("optimizer", "tp", "dp", "ep", "experts"), case, strict=True))
    saved = run(settings | {"load": False, "seed": 1}, tmp_path / "saved")
    source, there, back = tmp_path / "saved" / "checkpoint", tmp_path / "there", tmp_path / "back"
    if (
        case[0] == "offloaded_adam"
    ):  # saved in the layout that is written back: only the way there lays it out anew
        convert_to_fsdp_dtensor(str(source), str(there))
        source = there
    convert_to_torch_dist(str(source), str(back))
    loaded = run(settings | {"load": True, "seed": 2, "checkpoint": str(files_of(back))}, tmp_path / "loaded")
    assert saved and [rank.keys() for rank in saved] == [rank.keys() for rank in loaded]
    for ours, theirs in zip(loaded, saved, strict=True):
        for name, value in theirs.items():
            same = torch.equal(ours[name], value) if torch.is_tensor(value) else ours[name] == value
            assert same, (name, value, ours[name])


def run(case: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """What each rank holds after the release has saved or loaded."""
    out.mkdir()
    run_writer(WRITER, str(RELEASE), case, out, seconds=140)
    files = sorted(out.glob("held_*.pt"))
    return [torch.load(file, weights_only=False) for file in files]
