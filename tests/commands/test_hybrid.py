"""Hybrids through the commands: names, both formats bit for bit, the GPT model that one is, norms as weight - 1."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools import (
    ConvertOptions,
    ExportOptions,
    ImportOptions,
    TargetOptions,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
    diff_checkpoints,
    export_hf,
    import_hf,
    preflight,
)
from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.run_state.settings import settings_of
from ckpt_tools.model.box import Box
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels.casts import bfloat16_to_float32
from ckpt_tools.model.kernels.kernel import AddNumber
from tests.commands import oracle
from tests.commands.made import fsdp, torch_dist
from tests.commands.rewritten import Parts, read, write
from tests.folders import content
from tests.megatron.huggingface.by_rules import directory
from tests.megatron.huggingface.released import MAMBA2, NEMOTRON_3, NEMOTRON_H, QWEN3_5, QWEN3_NEXT

HYBRID_ARGS = ("is_hybrid_model", "hybrid_layer_pattern", "spec")
FUSED = "model.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def as_gpt(parts: Parts) -> None:
    """The same weights under the names of a GPT model."""

    def name(key: str) -> str:
        found = re.sub(r"layers\.(\d+)\.", lambda m: f"layers.{int(m[1]) // 2}.", key)
        return found.replace("final_norm", "final_layernorm")

    parts.rename(name)
    parts.args["num_layers"] = 2
    parts.args["hybrid_layer_pattern"] = parts.args["spec"] = None
    parts.args["is_hybrid_model"] = False


@pytest.mark.parametrize(
    ("implementation", "told"),
    [("local", ("is_hybrid_model",)), ("transformer_engine", ("hybrid_layer_pattern",)), ("inference_optimized", ()),
     ("local", ())],
)  # fmt: skip
def test_its_names_are_transformer_engines(implementation, told, cases, tmp_path):
    parts = read(cases / "llama_as_hybrid")
    parts.args["transformer_impl"] = implementation
    for name in set(HYBRID_ARGS) - set(told):
        parts.args.pop(name, None)
    source = write(tmp_path / "source", parts)
    made = fsdp(source)
    keys = oracle.tensors(made)
    assert FUSED in keys and not any("input_layernorm" in key for key in keys)
    oracle.assert_same(torch_dist(made), parts.tensors)


def test_a_job_may_say_either_implementation(cases, tmp_path):
    convert_to_fsdp_dtensor(cases / "llama_as_hybrid", tmp_path / "out")
    for implementation in ("local", "transformer_engine"):
        report = preflight(str(tmp_path / "out"), ["--transformer-impl", implementation]).report
        (rule,) = (check for check in report.checks if check.name == "layer-spec")
        assert rule.findings == ()


def test_a_contrary_flag_is_an_error(cases, tmp_path):
    options = ConvertOptions(target=TargetOptions(layer_spec="local"))
    with pytest.raises(MappingError, match="--layer-spec local: a HybridModel"):
        convert_to_fsdp_dtensor(cases / "llama_as_hybrid", tmp_path / "out", options)


@pytest.mark.parametrize(
    "args",
    [
        {"hybrid_override_pattern": "M-M*"},
        {"hybrid_attention_ratio": 0.1},
        {"spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]},
    ],
)
def test_every_way_to_ask_for_one_is_known(args):
    assert settings_of({"transformer_impl": "local"} | args).local_norms is False
    plain = dict.fromkeys(args)
    assert settings_of({"transformer_impl": "local", "hybrid_context_parallel": True} | plain).local_norms


@pytest.mark.parametrize("through", ["torch_dist", "fsdp_dtensor"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_attention_and_mlp_in_turn_are_exported_as_a_gpt_model(through, dtype, cases, tmp_path):
    source = cases / "llama_as_hybrid"
    parts = read(source)
    as_gpt(parts)
    export_hf(write(tmp_path / "gpt", parts), tmp_path / "truth", ExportOptions(dtype=dtype))
    if through == "fsdp_dtensor":
        convert_to_fsdp_dtensor(source, tmp_path / "fsdp")
        source = tmp_path / "fsdp"
    report = export_hf(source, tmp_path / "out", ExportOptions(dtype=dtype))
    assert "a HybridModel of 4 layers '*-*-' is exported as 2 transformer layers" in report.notes
    assert content(tmp_path / "out") == content(tmp_path / "truth")


def swap_last_layers(key: str) -> str:
    return re.sub(r"layers\.([23])\.", lambda m: f"layers.{5 - int(m[1])}.", key)


def test_another_order_of_layers_is_refused_by_its_pattern(cases, tmp_path):
    parts = read(cases / "llama_as_hybrid")
    parts.rename(swap_last_layers)
    parts.args["hybrid_layer_pattern"] = "*--*"
    with pytest.raises(MappingError, match=r"HybridModel of layers '\*--\*', is not a whole nemotron_h"):
        export_hf(write(tmp_path / "a", parts), tmp_path / "out")
    parts.args["hybrid_layer_pattern"] = "*-*-"
    with pytest.raises(
        MappingError, match=r"args say hybrid pattern '\*-\*-', the weights have layers '\*--\*'"
    ):
        export_hf(write(tmp_path / "b", parts), tmp_path / "out")


def test_mamba_layers_are_refused_by_name(cases, tmp_path):
    parts = read(cases / "llama_as_hybrid")
    parts.rename(lambda key: key.replace("layers.2.self_attention.linear_proj", "layers.2.mixer.out_proj"))
    with pytest.raises(
        MappingError, match=r"decoder\.layers\.2: a layer of a HybridModel is .*\['\*', 'M'\]"
    ):
        export_hf(write(tmp_path / "a", parts), tmp_path / "out")


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
