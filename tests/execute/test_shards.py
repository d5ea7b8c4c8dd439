"""No safetensors file is published that the safetensors library does not open."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.commands.huggingface.export_hf import export_hf
from ckpt_tools.commands.huggingface.export_source import ExportOptions
from ckpt_tools.errors import VerificationError
from ckpt_tools.execute.move.source_reader import SourceReader
from ckpt_tools.execute.output import remote_output
from ckpt_tools.execute.output.local_output import LocalOutput
from ckpt_tools.execute.output.remote_output import MARKER, RemoteOutput, Stretch, note_of
from ckpt_tools.formats.storage.open_files import open_files
from tests.conftest import DATA

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"


def broken(raw: bytes, damage: str) -> bytes:
    old, new = {
        "length": (raw[:8], bytes(8)),
        "offsets": (b'"data_offsets":[0,', b'"data_offsets":[1,'),
        "name": (b"final", b"linal") if b"final" in raw else (b"model.norm", b"model.morn"),
        "cut": (raw, raw[:-1]),
    }[damage]
    assert old in raw
    return raw.replace(old, new, 1)


@pytest.mark.parametrize("damage", ["length", "offsets", "name", "cut"])
def test_a_damaged_shard_is_not_published(damage, tmp_path, monkeypatch):
    real = LocalOutput.work

    def work_and_damage(
        output: LocalOutput, source: SourceReader, opened: Mapping[str, str | None]
    ) -> object:
        done = real(output, source, opened)
        (path,) = Path(output.data).glob("*.safetensors")
        path.write_bytes(broken(path.read_bytes(), damage))
        return done

    monkeypatch.setattr(LocalOutput, "work", work_and_damage)
    with pytest.raises(VerificationError, match="the safetensors library does not"):
        export_hf(str(LLAMA), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    export_hf(str(LLAMA), str(tmp_path / "out"))


@pytest.mark.parametrize("damage", ["length", "offsets", "name", "cut"])
def test_nor_is_one_in_a_store(damage, monkeypatch):
    store, name = f"memory://shards-{damage}", "model.safetensors"
    real = remote_output._content

    def damaged(entries: Any, stretch: Stretch, pump: Any) -> Iterator[bytes]:
        raw = b"".join(bytes(part) for part in real(entries, stretch, pump))
        yield broken(raw, damage)

    monkeypatch.setattr(remote_output, "_content", damaged)
    monkeypatch.setattr(RemoteOutput, "_check_objects", lambda *_: None)  # looks at the length
    with pytest.raises(
        VerificationError, match=rf"{store}/model.safetensors: the safetensors library does not"
    ):
        export_hf(str(LLAMA), store)
    assert set(open_files(store).list()) == {MARKER, note_of(name), name}  # no config.json
    monkeypatch.undo()
    export_hf(str(LLAMA), store, ExportOptions(overwrite=True))
