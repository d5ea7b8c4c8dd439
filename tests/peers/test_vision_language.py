"""Vision-language models written here and now by released Megatron-Bridge: both ways, against what it loaded.

`tests/peers/run` installs the releases; without them these tests are skipped.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from ckpt_tools.cli.app import run
from tests.peers.releases import run_writer
from tests.peers.test_optimizer_layouts import PEERS

WRITER = Path(__file__).with_name("write_vision_language.py")
RELEASES = [PEERS / name for name in ("megatron_core-0.16.1", "megatron_bridge-0.3.1", "transformers-4.57.6",
                                      "einops-0.8.2")]  # fmt: skip
TEXT = {"vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip
VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4,
          "out_hidden_size": 24}  # fmt: skip
SIGLIP = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
          "patch_size": 4, "image_size": 16, "model_type": "siglip_vision_model",
          "vision_use_head": False}  # fmt: skip
# By model_type; `settings` are those of Bridge's provider that its bridge does not take from config.json.
CASES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text": {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}},
        "vision": {**VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        "settings": {"mrope_section": [1, 1, 1]},
    },
    "qwen3_vl": {
        "text": {**TEXT, "head_dim": 8, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1],
                                                         "mrope_interleaved": True}},
        "vision": {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "gemma3": {
        "text": {**TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "sliding_window_pattern": 2,
                 "layer_types": ["sliding_attention", "full_attention"], "rope_scaling": None},
        "vision": SIGLIP,
        "fields": {"mm_tokens_per_image": 4},
        "settings": {"interleaved_attn_pattern": [1, 1]},
    },
}  # fmt: skip


def bits(folder: Path) -> dict[str, Any]:
    found = load_file(folder / "model.safetensors")
    return {key: (str(array.dtype), array.shape, array.tobytes()) for key, array in found.items()}


@pytest.mark.peer
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", CASES)
def test_a_run_of_bridge_is_the_model_that_it_was_loaded_from(kind, tp, tmp_path, capsys):
    """Exported, every tensor of every tower bit for bit; imported, every key and value that Bridge has saved."""
    for release in RELEASES:
        if not release.is_dir():
            pytest.skip(f"{release.name} is not in CKPT_TOOLS_PEERS (tests/peers/run installs it)")
    case = {"kind": kind, "tp": tp, "fields": {}, "settings": {}, **CASES[kind]}
    run_writer(WRITER, os.pathsep.join(map(str, RELEASES)), case, tmp_path)
    hf, source, back = tmp_path / "hf", tmp_path / "run", tmp_path / "back"
    assert run(["export-hf", str(source), str(tmp_path / "out"), "--hf-config", str(hf)]) == 0
    assert "the checkpoint has none" not in capsys.readouterr().out
    assert bits(tmp_path / "out") == bits(hf)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (hf / "config.json").read_text()
    )
    assert run(["import-hf", str(hf), str(back), "--vocab-size-padded", "96", "-q"]) == 0
    capsys.readouterr()
    assert run(["diff", str(source), str(back), "--by", "keys", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {one["kind"] for one in report["tensors"]} == {"equal"}
    assert all(
        "_extra_state/" in one["key"] or one["key"].startswith("common_state") for one in report["values"]
    )
    fsdp = tmp_path / "fsdp"
    assert run(["convert", str(source), str(fsdp), "--gpus", "4", "--tp", "2", "--weights-only", "-q"]) == 0
    assert run(["export-hf", str(fsdp), str(tmp_path / "again"), "--hf-config", str(hf), "-q"]) == 0
    assert bits(tmp_path / "again") == bits(hf)
