"""`--aliases`: the names of every target at once, on the same bytes."""

from __future__ import annotations

from ckpt_tools.commands.to_fsdp_dtensor import ConvertOptions, convert_to_fsdp_dtensor
from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions
from tests.commands import oracle
from tests.conftest import fixture_dir


def convert(output, **options):
    source = str(fixture_dir("main_mla_mtp_moe_fr_tp2") / "checkpoint")
    return convert_to_fsdp_dtensor(source, str(output), ConvertOptions(target=TargetOptions(**options)))


def test_one_checkpoint_serves_every_spelling_without_more_payload(tmp_path):
    spellings = ("main", "core-0.16", "core-0.19")
    reports = [convert(tmp_path / name, dialect=name) for name in spellings]
    both = convert(tmp_path / "both", aliases=True)
    assert both.written.bytes_written == reports[0].written.bytes_written
    paths = {name: oracle.metadata(tmp_path / name).planner_data for name in (*spellings, "both")}
    assert len({frozenset(paths[name]) for name in spellings}) == 3
    assert paths["both"] == paths["main"] | paths["core-0.16"] | paths["core-0.19"]
    shared = oracle.tensors(tmp_path / "both")
    for name in spellings:
        tensors = oracle.tensors(tmp_path / name)
        assert all(oracle.same_bytes(shared[key], tensor) for key, tensor in tensors.items())
