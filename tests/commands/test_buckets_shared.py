"""Commands that read flat buckets pass on how many workers prove them (the bytes: `test_shared_proof`)."""

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.edit import average
from ckpt_tools.commands.edit import slice as slicing
from ckpt_tools.commands.job import read_model
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import Share, by_threads
from tests.conftest import fixture_dir

BUCKETS = "core019_llama_tp2_dp_reshardable"
COMMANDS = (
    "average RUN RUN OUT", "strip RUN OUT", "stats RUN --by parameters", "export-hf RUN OUT", "convert RUN OUT",
    "convert RUN OUT --to torch_dist", "slice RUN OUT --layers 0:1",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_workers_are_passed_on(command, tmp_path, monkeypatch):
    asked = set[int | None]()

    def shared_by(workers: int | None) -> Share:
        asked.add(workers)
        return by_threads

    for module in (read_model, average, slicing):
        monkeypatch.setattr(module, "shared_by", shared_by)
    words = command.replace("RUN", str(fixture_dir(BUCKETS))).replace("OUT", str(tmp_path / "out")).split()
    assert run([*words, "-q", "--workers", "3"]) == 0
    assert asked == {3}
