"""`export-hf --quantize fp8-block`: codes and scales are the reference's, and come back as our import reads them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools import ExportOptions, ImportOptions, TargetOptions, diff_checkpoints, export_hf, import_hf
from ckpt_tools.cli.app import run
from ckpt_tools.errors import CorruptCheckpointError, MappingError, UsageError
from ckpt_tools.execute.run import WriteOptions
from tests.commands.test_huggingface import GPT2, GPT_OSS
from tests.megatron.huggingface.by_rules import DEEPSEEK, LLAMA, QWEN3_MOE, directory
from tests.megatron.huggingface.quantized_models import spread
from tests.model.test_quantize_kernels import reference

LINEAR = re.compile(r"layers\.\d+\.(self_attn|mlp)\..*proj(_with_mqa)?\.weight$")
PUBLISHED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
FLOAT32 = ("e_score_correction_bias",)


def model(
    folder: Path, config: dict[str, Any], settings: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """A random bfloat16 model; `settings` say how it was once published, beside plain weights."""
    folder.mkdir()
    tensors = {
        key: torch.from_numpy(array).to(torch.float32 if key.endswith(FLOAT32) else torch.bfloat16)
        for key, array in directory(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    if settings is not None:
        (folder / "reference").mkdir()
        (folder / "reference" / "config.json").write_text(
            json.dumps({**config, "torch_dtype": "bfloat16", "quantization_config": settings})
        )
    return tensors


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_quantized(
    found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], block: tuple[int, int], powers: bool
) -> None:
    linears = {key for key in plain if LINEAR.search(key)}
    assert linears and found.keys() == plain.keys() | {f"{key}_scale_inv" for key in linears}
    for key, tensor in plain.items():
        if key not in linears:
            assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
            continue
        codes, scales = reference(tensor, block, powers)
        assert torch.equal(found[key].view(torch.uint8), codes.view(torch.uint8)), key
        scale = found[f"{key}_scale_inv"]
        assert scale.dtype == torch.float32 and torch.equal(scale, scales), key


CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, tuple[int, int]]] = {
    "published": (DEEPSEEK, None, (128, 128)),
    "as the reference": (DEEPSEEK, {**PUBLISHED, "weight_block_size": [4, 5]}, (4, 5)),
    "ue8m0": (DEEPSEEK, {**PUBLISHED, "weight_block_size": [3, 4], "scale_fmt": "ue8m0"}, (3, 4)),
    "another family": (QWEN3_MOE, {**PUBLISHED, "weight_block_size": [2, 7]}, (2, 7)),
}


@pytest.mark.parametrize("to", ["torch_dist", "fsdp_dtensor"])
@pytest.mark.parametrize("name", CASES)
def test_linears_become_codes_and_scales_and_come_back(name, to, tmp_path):
    config, settings, block = CASES[name]
    plain = model(tmp_path / "hf", config, settings)
    import_hf(
        tmp_path / "hf", tmp_path / "run", ImportOptions(to=to, fsdp=TargetOptions(fresh_optimizer=False))
    )
    options = ExportOptions(
        quantize="fp8-block",
        hf_config=str(tmp_path / "hf" / "reference") if settings else None,
        max_shard_bytes=2000,
        write=WriteOptions(memory_bytes=1 << 20),
    )
    report = export_hf(tmp_path / "run", tmp_path / "fp8", options)
    found, powers = tensors_of(tmp_path / "fp8"), name == "ue8m0"
    assert_quantized(found, plain, block, powers)
    assert report.tensors == len(found)
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    left_alone = said.pop("modules_to_not_convert", None)
    assert said == (settings or PUBLISHED)
    assert (left_alone is None) == (config is DEEPSEEK)
    if left_alone is not None:
        assert left_alone == ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))]
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    import_hf(tmp_path / "fp8", tmp_path / "again")
    export_hf(tmp_path / "again", tmp_path / "back")
    for key, tensor in tensors_of(tmp_path / "back").items():
        expected = plain[key]
        if LINEAR.search(key):
            codes, scales = reference(expected, block, powers)
            expected = (codes.float() * spread(scales, block, tuple(expected.shape))).bfloat16()
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), key


def test_quantized_again_the_values_stay(tmp_path):
    """Scales that are powers of two lose nothing the second time; codes may be twice as large, scales half."""
    settings = {**PUBLISHED, "weight_block_size": [4, 5], "scale_fmt": "ue8m0"}
    model(tmp_path / "hf", DEEPSEEK, settings)
    options = ExportOptions(quantize="fp8-block", hf_config=str(tmp_path / "hf" / "reference"))
    for source, run_, out in (("hf", "run", "one"), ("one", "run2", "two")):
        import_hf(tmp_path / source, tmp_path / run_)
        export_hf(tmp_path / run_, tmp_path / out, options)
    assert diff_checkpoints(tmp_path / "one", tmp_path / "run2").is_equal
    assert diff_checkpoints(tmp_path / "two", tmp_path / "run2").is_equal
    assert not diff_checkpoints(tmp_path / "two", tmp_path / "run").is_equal


def test_wide_weights_are_quantized_from_masters(tmp_path):
    from tests.conftest import DATA

    run_ = DATA / "core019_llama_tp2_fully_reshardable"
    export_hf(run_, tmp_path / "plain", ExportOptions(dtype="float32"))
    export_hf(run_, tmp_path / "fp8", ExportOptions(dtype="float32", quantize="fp8-block"))
    assert_quantized(tensors_of(tmp_path / "fp8"), tensors_of(tmp_path / "plain"), (128, 128), False)


def refused(
    error: type[Exception], tmp_path: Path, config: dict[str, Any], reference_: Any = None, **options: Any
) -> str:
    model(tmp_path / "hf", config)
    import_hf(tmp_path / "hf", tmp_path / "run")
    if reference_ is not None:
        place = tmp_path / "reference"
        place.mkdir()
        (place / "config.json").write_text(json.dumps({**config, "quantization_config": reference_}))
        options["hf_config"] = str(place)
    with pytest.raises(error) as caught:
        export_hf(tmp_path / "run", tmp_path / "out", ExportOptions(**{"quantize": "fp8-block", **options}))
    assert not (tmp_path / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [(GPT_OSS, "model.layers.0.mlp.experts.gate_up_proj"), (GPT2, "none is named as one")],
)
def test_families_that_are_not_published_so_are_refused(config, named, tmp_path):
    text = refused(MappingError, tmp_path, config)
    assert "is published so" in text and named in text


@pytest.mark.parametrize(
    "settings",
    [
        {**PUBLISHED, "weight_block_size": [128]},
        {**PUBLISHED, "weight_block_size": [0, 128]},
        {**PUBLISHED, "weight_block_size": None},
        {**PUBLISHED, "scale_fmt": "e5m2"},
        {**PUBLISHED, "fmt": "e5m2"},
    ],
)
def test_a_reference_with_another_form_is_refused(settings, tmp_path):
    assert "--quantize fp8-block: the quantization_config of --hf-config" in refused(
        MappingError, tmp_path, LLAMA, settings
    )


def test_other_names_are_refused(tmp_path):
    assert "fp8-block is written" in refused(UsageError, tmp_path, LLAMA, quantize="int4")
    code = run(["export-hf", str(tmp_path / "run"), str(tmp_path / "o"), "--quantize", "int4"])
    assert code == 2


def test_weights_that_are_not_numbers_are_refused(tmp_path):
    tensors = model(tmp_path / "hf", LLAMA)
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = torch.inf
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    import_hf(tmp_path / "hf", tmp_path / "run")
    with pytest.raises(
        CorruptCheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight.* infinities and NaNs"
    ):
        export_hf(tmp_path / "run", tmp_path / "out", ExportOptions(quantize="fp8-block"))
