"""`merge-adapter`: bit-equal to whole tensors in torch, for every way that adapters are stored; what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_tools.commands.merge_adapter import merge_adapter
from tests.commands import oracle
from tests.conftest import DATA
from tests.damage import ITERATION
from tests.megatron.adapter_checkpoints import FC1, FC2, PROJ, QKV, AdapterFolder, canonical, lora

RUN = DATA / "core019_llama_tp2_fully_reshardable"
HEADS, GROUPS, DIM = 4, 2, 8


def whole_delta(made: AdapterFolder, module: str) -> torch.Tensor:
    """What is added to the weight of a module, its parts put together head by head."""
    if module in made.matrices:
        return made.delta(module)
    if module == FC1:
        return torch.cat([made.delta(f"{FC1}.adapter_{part}") for part in ("gate", "up")], 1)
    q, k, v = (made.delta(f"{QKV}.adapter_{part}") for part in "qkv")
    rows = []
    for group in range(GROUPS):
        for head in range(HEADS // GROUPS):
            rows.append(q[:, (group * (HEADS // GROUPS) + head) * DIM :][:, :DIM])
        rows += [k[:, group * DIM :][:, :DIM], v[:, group * DIM :][:, :DIM]]
    return torch.cat(rows, 1)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("make", [lora, canonical])
def test_parts_are_added_to_masters_and_weights_are_their_rounding(
    make: object, tp: int, tmp_path: Path
) -> None:
    made = make(tp=tp)  # type: ignore[operator]
    report = merge_adapter(str(RUN), str(made.save(tmp_path / "adapter")), str(tmp_path / "out"))
    before, after = oracle.tensors(RUN / ITERATION), oracle.tensors(tmp_path / "out" / ITERATION)
    weights = {key for key in before if not key.startswith("optimizer.")}
    assert after.keys() == weights
    adapted = {f"{module.removesuffix('.adapter')}.weight": module for module in (QKV, PROJ, FC1, FC2)}
    for key in weights:
        expected = before[key]
        if key in adapted:
            master = before[f"optimizer.state.param.{key}"].reshape(expected.shape)
            expected = (master.double() + whole_delta(made, adapted[key])).float().to(expected.dtype)
            assert not torch.equal(expected, before[key])
        assert oracle.same_bytes(after[key], expected), key
    assert report.masters.found.tensors == 8
    assert any("scale 2 (alpha 6, by run_config.yaml)" in note for note in report.notes)
