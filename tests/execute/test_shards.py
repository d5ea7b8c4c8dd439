"""No safetensors file is published that the safetensors library does not open."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tools.commands.export_hf import export_hf
from ckpt_tools.errors import VerificationError
from ckpt_tools.execute import run
from tests.conftest import DATA

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"


@pytest.mark.parametrize("damage", ["length", "offsets", "name", "cut"])
def test_a_damaged_shard_is_not_published(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run._Job._work

    def work_and_damage(job: run._Job) -> object:
        counts = real(job)
        (path,) = Path(job._staging.data).glob("*.safetensors")
        raw = path.read_bytes()
        old, new = {
            "length": (raw[:8], bytes(8)),
            "offsets": (b'"data_offsets":[0,', b'"data_offsets":[1,'),
            "name": (b"final", b"linal") if b"final" in raw else (b"model.norm", b"model.morn"),
            "cut": (raw, raw[:-1]),
        }[damage]
        assert old in raw
        path.write_bytes(raw.replace(old, new, 1))
        return counts

    monkeypatch.setattr(run._Job, "_work", work_and_damage)
    with pytest.raises(VerificationError, match="the safetensors library does not"):
        export_hf(str(LLAMA), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    export_hf(str(LLAMA), str(tmp_path / "out"))
