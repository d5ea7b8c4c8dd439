"""Hybrids through the commands: both formats, bits, and norms that Megatron stores as weight - 1."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools import (
    ExportOptions,
    ImportOptions,
    TargetOptions,
    convert_to_torch_dist,
    diff_checkpoints,
    export_hf,
    import_hf,
)
from ckpt_tools.errors import MappingError
from ckpt_tools.model.box import Box
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels.casts import bfloat16_to_float32
from ckpt_tools.model.kernels.kernel import AddNumber
from tests.commands import oracle
from tests.megatron.huggingface.by_rules import directory
from tests.megatron.huggingface.released import MAMBA2, NEMOTRON_3, NEMOTRON_H, QWEN3_5, QWEN3_NEXT

NORM = "model.layers.0.linear_attn.norm.weight"
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "nemotron_h": NEMOTRON_H,
    "nemotron_3": NEMOTRON_3,
    "mamba2": MAMBA2,
}


def model(folder: Path, config: dict[str, Any], **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """A bfloat16 model in a directory; biases of routers are float32, as they are published."""
    made: dict[str, torch.Tensor] = {}
    for key, array in directory(config).items():
        wide = torch.from_numpy(array)
        wide = (1 + wide / 8).clip(0.5, 2) if key.endswith("linear_attn.norm.weight") else wide
        made[key] = wide if key.endswith("e_score_correction_bias") else wide.bfloat16()
    made |= changed
    folder.mkdir()
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_come_back_from_both_formats(name, tp, tmp_path):
    """Megatron-FSDP packs projections by tensor-parallel rank; the file beside a checkpoint says for how many."""
    source = model(tmp_path / "hf", CONFIGS[name])
    import_hf(tmp_path / "hf", tmp_path / "run")
    weights = ImportOptions(to="fsdp_dtensor", fsdp=TargetOptions(fresh_optimizer=False, tp=tp))
    import_hf(tmp_path / "hf", tmp_path / "fsdp", weights)
    convert_to_torch_dist(tmp_path / "fsdp", tmp_path / "again")
    for kept in ("run", "fsdp", "again"):
        export_hf(tmp_path / kept, tmp_path / f"of {kept}", ExportOptions(hf_config=str(tmp_path / "hf")))
        found = load_file(tmp_path / f"of {kept}" / "model.safetensors")
        oracle.assert_same(found, source)
    assert diff_checkpoints(tmp_path / "hf", tmp_path / "run").is_equal


@pytest.mark.parametrize("to", ["torch_dist", "fsdp_dtensor"])
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_there_are_no_local_modules_of_them(name, to, tmp_path):
    model(tmp_path / "hf", CONFIGS[name])
    local = ImportOptions(to=to, layer_spec="local", fsdp=TargetOptions(fresh_optimizer=False))
    with pytest.raises(MappingError, match="--layer-spec local: Megatron builds the layers of"):
        import_hf(tmp_path / "hf", tmp_path / "run", local)
    assert not (tmp_path / "run").exists()


def test_a_norm_is_stored_as_weight_minus_one(tmp_path):
    """Rounded once, and what that cost is counted: numbers below a half lose bits."""
    weight = torch.tensor([1.0, 0.5, 1.9921875, 0.1, 0.30078125]).bfloat16()
    model(tmp_path / "hf", QWEN3_NEXT, **{NORM: weight})
    report = import_hf(tmp_path / "hf", tmp_path / "run")
    (note,) = (note for note in report.notes if "was added" in note)
    norm = "decoder.layers.0.self_attention.out_norm.weight"
    assert note.startswith("-1 was added to 6 norms in float32") and f"most of them (1) in {norm}" in note
    stored = oracle.tensors(tmp_path / "run" / "release")[norm]
    assert oracle.same_bytes(stored, (weight.float() - 1).bfloat16())
    plain = "decoder.layers.0.self_attention.in_proj.layer_norm_weight"
    source = load_file(tmp_path / "hf" / "model.safetensors")
    assert oracle.same_bytes(
        oracle.tensors(tmp_path / "run" / "release")[plain], source["model.layers.0.input_layernorm.weight"]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_number_is_added_once(dtype):
    values = np.array([1.0, 0.1, 3.0e38, np.nan, -0.0], np.float32)
    kernel = AddNumber(dtype, -1.0)
    assert kernel.form([Form("float32", (5,))]) == Form(dtype, (5,))
    made = kernel.compute(Box((0,), (5,)), [values])
    truth = torch.from_numpy(values) - 1
    wide = bfloat16_to_float32(made) if dtype == "bfloat16" else made
    assert np.array_equal(wide, truth.to(getattr(torch, dtype)).float().numpy(), equal_nan=True)
    with pytest.raises(ValueError, match="not to bfloat16"):
        kernel.form([Form("bfloat16", (5,))])
