"""Quantized models through `import-hf`, `diff` and `export-hf --quantize`: an independent decoder and encoder."""

import json
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools import ExportOptions, ImportOptions, TargetOptions, diff_checkpoints, export_hf, import_hf
from ckpt_tools.cli.app import run
from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.quantization.quantized import dequantized
from ckpt_tools.model.catalog import Catalog, TensorEntry
from tests.commands import oracle
from tests.commands.test_huggingface import GPT2, GPT_OSS
from tests.megatron.huggingface.by_rules import DEEPSEEK, LLAMA, QWEN3_MOE, directory
from tests.megatron.huggingface.quantized_models import (
    MODELS,
    Quantized,
    compressed,
    compressed_fp8,
    compressed_int4,
    fp8_blocks,
    fp8_tensors,
    gpt_oss,
    spread,
    weights,
)
from tests.model.test_quantize_kernels import reference

RATES = {"torch_dist": TargetOptions(), "fsdp_dtensor": TargetOptions(lr=1e-5, min_lr=1e-6, weight_decay=0.1)}


@pytest.mark.parametrize("to", RATES)
@pytest.mark.parametrize("name", MODELS)
def test_imported_values_are_the_dequantized_ones(name, to, tmp_path):
    model = MODELS[name]()
    source = model.save(tmp_path / "hf")
    done = import_hf(source, tmp_path / "run", ImportOptions(to=to, fsdp=RATES[to]))
    export_hf(tmp_path / "run", tmp_path / "out")
    oracle.assert_same(oracle.model(tmp_path / "out"), model.plain)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    quantized = sum(key not in model.stored or model.stored[key].element_size() == 1 for key in model.plain)
    counts = [int(note.split()[0]) for note in done.notes if "tensors were dequantized from" in note]
    assert sum(counts) == quantized >= 4
    assert all("cannot be recovered from the values" in note for note in done.notes[: len(counts)])


def test_another_type_is_cast_from_the_dequantized_values(tmp_path):
    model = gpt_oss()
    import_hf(model.save(tmp_path / "hf"), tmp_path / "run", ImportOptions(dtype="float32"))
    export_hf(tmp_path / "run", tmp_path / "out")
    wide = {key: tensor.float() for key, tensor in model.plain.items()}
    oracle.assert_same(oracle.model(tmp_path / "out"), wide)


def test_the_report_says_what_was_dropped(tmp_path):
    source = fp8_tensors().save(tmp_path / "hf")
    done = import_hf(source, tmp_path / "run", dry_run=True)
    assert len([line for line in done.dropped if "a scale of activations" in line]) == 14
    assert done.notes[0].startswith("14 tensors were dequantized from FP8 to bfloat16")


@pytest.mark.parametrize("make", [fp8_blocks, gpt_oss, compressed_int4])
def test_diff_sees_the_same_values(make, tmp_path, capsys):
    """And one scale that is another."""
    model = make()
    source = model.save(tmp_path / "hf")
    import_hf(source, tmp_path / "run")

    def diff(folder: Path) -> tuple[int, Any]:
        capsys.readouterr()
        code = run(["diff", str(folder), str(tmp_path / "run"), "-q", "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, report = diff(source)
    assert (code, report["by"], report["equal"]) == (0, "huggingface", True)
    assert {one["key"] for one in report["tensors"]} == model.plain.keys()
    assert any("tensors were dequantized from" in note for note in report["notes"])
    scale = next(
        key for key in model.stored if "layers.1.mlp" in key and "down_proj" in key and "_scale" in key
    )
    model.stored[scale] = model.stored[scale].clone()
    model.stored[scale].view(-1)[0] += 1
    code, report = diff(model.save(tmp_path / "changed"))
    wrong = [one["key"] for one in report["tensors"] if one["kind"] != "equal"]
    assert (code, wrong) == (1, [scale[: scale.index("_scale")]])


def test_the_time_grows_with_the_number_of_tensors_and_not_faster(tmp_path):
    """DeepSeek-V3 has 45,000 quantized weights."""
    tensors = {}
    for n in range(20_000):
        name = f"model.layers.{n}.mlp.up_proj.weight"
        tensors[name] = TensorEntry(name, "float8_e4m3fn", (256, 128), ())
        tensors[f"{name}_scale_inv"] = TensorEntry(f"{name}_scale_inv", "float32", (2, 1), ())
    listed = [f"model.layers.{n}.mlp.gate" for n in range(20_000, 20_200)]
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": listed}
    with closing(open_files(str(tmp_path))) as files:
        started = time.process_time()
        plain = dequantized(Catalog("", tensors, {}), {"quantization_config": settings}, files)
        assert time.process_time() - started < 10  # a set of all names for each weight takes far longer
    assert len(plain.specs) == 20_000 and len(plain.parts) == 40_000
    assert set(plain.specs.values()) == {Spec("bfloat16", (256, 128))}


Change = Callable[[Quantized], Any]
Q = "model.layers.0.self_attn.q_a_proj.weight"
LLAMA_Q = "model.layers.0.self_attn.q_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def drop(name: str) -> Change:
    return lambda model: model.stored.pop(name)


def settings(**fields: Any) -> Change:
    return lambda model: model.settings.update(fields)


def store(name: str, tensor: torch.Tensor) -> Change:
    return lambda model: model.stored.update({name: tensor})


def one_group(layout: str = "float-quantized", **fields: Any) -> Change:
    """Another scheme than the tensors have."""
    return lambda model: model.config.update(quantization_config=compressed([weights(**fields)], layout))


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 4}


@pytest.mark.parametrize(
    ("make", "change", "said"),
    [
        (fp8_blocks, drop(f"{Q}_scale_inv"), f"its scales, {Q}_scale_inv, are missing"),
        (fp8_blocks, drop(Q), f"{Q}_scale_inv: there is no quantized weight"),
        (fp8_blocks, store(f"{Q}_scale_inv", torch.ones(1, 1)), f"{Q}: .* has scales"),
        (fp8_blocks, store(f"{Q}_scale_inv", torch.ones(1, 2, dtype=torch.uint8)), "_scale_inv is uint8"),
        (fp8_blocks, settings(weight_block_size=[4, 4]), "in blocks of .4, 4. has scales"),
        (fp8_blocks, settings(weight_block_size=[0, 128]), "expected two lengths"),
        (fp8_blocks, settings(weight_block_size=None), "in blocks of"),
        (fp8_blocks, settings(modules_to_not_convert=["model.layers.*.self_attn"]), "leaves its module alone"),
        (fp8_blocks, settings(modules_to_not_convert=["q_a_proj"]), "leaves its module alone .'q_a_proj'"),
        (fp8_blocks, settings(modules_to_not_convert="q_a_proj"), "expected a list of module names"),
        (fp8_blocks, store(f"{Q} as stored", torch.ones(2)), "is stored twice"),
        (fp8_blocks, lambda model: model.config.pop("quantization_config"), "has no quantization_config"),
        (fp8_blocks, lambda model: model.config.update(torch_dtype="int8"), "torch_dtype is 'int8'"),
        (gpt_oss, drop(f"{EXPERTS}_scales"), f"its scales, {EXPERTS}_scales, are missing"),
        (gpt_oss, drop(f"{EXPERTS}_blocks"), f"{EXPERTS}_scales: there is no quantized weight"),
        (gpt_oss, store(f"{EXPERTS}_scales", torch.ones(3, 64, 2, dtype=torch.uint8)), "and a scale for each"),
        (gpt_oss, store(EXPERTS, torch.ones(3, 96, 64)), f"{EXPERTS} is stored twice"),
        (gpt_oss, settings(modules_to_not_convert=["model.layers.1.mlp"]), "leaves its module alone"),
        (gpt_oss, lambda model: model.config.pop("quantization_config"), "has no quantization_config"),
        (compressed_int4, drop(f"{LLAMA_Q}_scale"), f"its scales, {LLAMA_Q}_scale, are missing"),
        (compressed_int4, drop(f"{LLAMA_Q}_packed"), f"{LLAMA_Q}_scale: there is no quantized weight"),
        (compressed_int4, drop(f"{LLAMA_Q}_shape"), f"its shape, {LLAMA_Q}_shape with two integers, is missing"),
        (compressed_int4, store(f"{LLAMA_Q}_shape", torch.tensor([16, 20])), f"{LLAMA_Q}: .* are stored as"),
        (compressed_int4, store(f"{LLAMA_Q}_shape", torch.tensor([15, 12])), "weight_shape is .15, 12."),
        (compressed_int4, store(f"{LLAMA_Q}_shape", torch.tensor([16, 0])), "are stored as|whole groups"),
        (compressed_int4, store(f"{LLAMA_Q}_shape", torch.tensor([16, -12])), "are stored as|whole groups"),
        (compressed_int4, store(f"{LLAMA_Q}_g_idx", torch.zeros(12)), "g_idx: there is no quantized weight"),
        (compressed_int4, store(LLAMA_Q, torch.zeros(16, 12)), "is stored twice"),
        (compressed_int4, settings(ignore=["re:.*self_attn.*"]), "leaves its module alone .'re:.*self_attn"),
        (compressed_int4, settings(ignore=["model.layers.0.self_attn.q_proj"]), "leaves its module alone"),
        (compressed_int4, one_group("pack-quantized", **INT4 | {"group_size": 6}), "in groups of 6"),
        (compressed_int4, one_group("pack-quantized", **INT4 | {"symmetric": False}), "zero points are part"),
        (compressed_int4, one_group(strategy="channel"), "config.json has no scheme of INT4"),
        (compressed_int4, lambda model: model.config.update(torch_dtype="float16"), "Correct torch_dtype"),
        (compressed_int4, settings(config_groups={}), "expected groups"),
        (lambda: compressed_int4(zero_points=True), one_group("pack-quantized", **INT4), "zero points are not"),
    ],
)  # fmt: skip
def test_parts_that_do_not_belong_together_are_named(make, change, said, tmp_path):
    model = make()
    change(model)
    with pytest.raises(MappingError, match=said):
        import_hf(model.save(tmp_path / "hf"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def sparse(model: Quantized) -> None:
    model.settings["sparsity_config"] = {"format": "sparse-24-bitmask"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (settings(quant_method="awq"), "quantized by AWQ; read are fp8, mxfp4, compressed-tensors"),
        (settings(quant_method="gptq"), "quantized by GPTQ"),
        (settings(quant_method="bitsandbytes"), "quantized by bitsandbytes.*save_pretrained"),
        (settings(quant_method="next_year"), "quantized by 'next_year'"),
        (settings(quant_method=None), "quantized by None"),
        (lambda model: model.config.update(quantization_config="fp8"), "quantized by 'fp8'"),
        (one_group("int-quantized", num_bits=8, type="int", strategy="channel"), "8-bit int, is not read"),
        (one_group("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group"), "4-bit float, is not read"),
        (one_group("marlin-24", **INT4), "4-bit int in the format 'marlin-24'"),
        (one_group("pack-quantized", **INT4 | {"actorder": "group"}), "order of their activations"),
        (one_group(strategy="token"), "a scale for each token"),
        (sparse, "sparse-24-bitmask"),
    ],
)
def test_other_quantizations_are_refused_with_the_way_out(change, said, tmp_path):
    model = compressed_fp8("channel", torch.bfloat16)
    change(model)
    with pytest.raises(UnsupportedCheckpointError, match=said) as caught:
        import_hf(model.save(tmp_path / "hf"), tmp_path / "run")
    assert "import the model that it was quantized from" in str(caught.value)


def test_a_scale_that_is_not_a_number_is_damage_with_its_place(tmp_path):
    model = gpt_oss()
    model.stored[f"{EXPERTS}_scales"][2, 5, 1] = 255
    with pytest.raises(CorruptCheckpointError, match=rf"{EXPERTS} \[2:3, .*scale is 255"):
        import_hf(model.save(tmp_path / "hf"), tmp_path / "run")


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
