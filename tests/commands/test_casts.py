"""Casts of a conversion: what overflows is refused by name, what is rounded is counted, types are a model's own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools import (
    ConvertOptions,
    ExportOptions,
    ImportOptions,
    TargetOptions,
    ToTorchDistOptions,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
    export_hf,
    import_hf,
    load_dtensors,
)
from ckpt_tools.cli.app import run
from ckpt_tools.errors import VerificationError
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.model.target import TargetTensor, kept_exactly
from ckpt_tools.model.views import Source
from tests.commands import oracle
from tests.commands.launched import one_rank
from tests.commands.rewritten import Parts, read, write
from tests.conftest import RUN

LLAMA = RUN / "iter_0000002"
LARGE = "decoder.layers.mlp.linear_fc2.weight"
MASTER = f"optimizer.state.param.{LARGE}"


def too_large() -> Parts:
    """A run with two weights that no float16 can hold."""
    parts = read(LLAMA)
    for at, value in (((1, 3, 5), 70_000.0), ((1, 3, 9), -1e6)):
        parts.tensors[MASTER][at] = value
        parts.tensors[LARGE][at] = value
    parts.tensors[LARGE] = parts.tensors[MASTER].bfloat16()
    return parts


@pytest.mark.parametrize("to", ["fsdp_dtensor", "torch_dist", "hf", "hf again", "import"])
def test_what_no_float16_can_hold_is_refused_by_name(to, tmp_path):
    source = str(write(tmp_path / "source", too_large()))
    out = tmp_path / "out"
    key, element = "model.layers.1.mlp.down_proj.weight", "[3, 5]: 70144.0"
    with pytest.raises(VerificationError) as caught:
        if to == "fsdp_dtensor":
            key, element = "model.module.decoder.layers.1.mlp.linear_fc2.weight", "[3, 5]: 70000.0"
            wanted = TargetOptions(weights_only=True, dtype="float16")
            convert_to_fsdp_dtensor(source, out, ConvertOptions(target=wanted))
        elif to == "hf":
            export_hf(source, out, ExportOptions(dtype="float16"))
        elif to == "import":
            key, element = "decoder.layers.mlp.linear_fc2.weight", "[1, 3, 5]: 70144.0"
            export_hf(source, tmp_path / "hf")
            import_hf(tmp_path / "hf", out, ImportOptions(dtype="float16"))
        else:
            convert_to_fsdp_dtensor(source, tmp_path / "fsdp")
            element = "[3, 5]: 70000.0"
            if to == "hf again":
                export_hf(tmp_path / "fsdp", out, ExportOptions(dtype="float16"))
            key, element = LARGE, "[1, 3, 5]: 70000.0"
            options = ToTorchDistOptions(target=TorchDistOptions(dtype="float16"))
            convert_to_torch_dist(tmp_path / "fsdp", out, options)
    if to == "hf again":
        key, element = "model.layers.1.mlp.down_proj.weight", "[3, 5]: 70000.0"
    assert str(caught.value).startswith(f"{key}{element} is too large for float16 and would become infinite")
    assert "Choose another --dtype (bfloat16, float32, float64)" in str(caught.value)
    assert not out.exists() or not any(path.is_file() for path in out.rglob("*"))


def test_a_job_is_not_handed_infinities(tmp_path):
    source = str(write(tmp_path / "source", too_large()))
    options = ConvertOptions(target=TargetOptions(weights_only=True, dtype="float16"))
    with (
        one_rank() as mesh,
        pytest.raises(VerificationError, match=r"fc2\.weight\[3, 5\]: 70000\.0 is too large"),
    ):
        load_dtensors(source, mesh, options=options)


def test_what_rounding_changes_is_counted(tmp_path):
    convert_to_fsdp_dtensor(RUN, tmp_path / "fsdp")
    report = export_hf(tmp_path / "fsdp", tmp_path / "hf")
    wide = export_hf(tmp_path / "fsdp", tmp_path / "wide", ExportOptions(dtype="float32"))
    before, after = oracle.model(tmp_path / "wide"), oracle.model(tmp_path / "hf")
    changed = {key: int((before[key] != after[key].float()).sum()) for key in before}
    assert report.written is not None and wide.written is not None
    assert wide.written.rounded_tensors == 0 and wide.written.rounded_most is None
    assert report.written.rounded_elements == sum(changed.values()) > 10_000
    assert report.written.rounded_tensors == sum(count > 0 for count in changed.values())
    assert changed[report.written.rounded_most or ""] == max(changed.values())


def test_weights_beside_their_masters_lose_nothing(tmp_path, capsys):
    """With the masters they round; alone, what the source has of them is gone."""
    fsdp, back, alone = (str(tmp_path / name) for name in ("fsdp", "back", "alone"))
    convert_to_fsdp_dtensor(RUN, fsdp)
    whole = convert_to_torch_dist(fsdp, back).written
    weights = ToTorchDistOptions(target=TorchDistOptions(weights_only=True))
    lost = convert_to_torch_dist(fsdp, alone, weights).written
    assert whole is not None and lost is not None
    parts = read(Path(back) / "iter_0000002")
    pairs = [(w, parts.tensors.get(f"optimizer.state.param.{k}")) for k, w in parts.tensors.items()]
    changed = sum(int((weight.float() != master).sum()) for weight, master in pairs if master is not None)
    assert (whole.rounded_elements, whole.rounded_tensors, whole.rounded_most) == (0, 0, None)
    assert whole.rounded_and_kept == lost.rounded_elements == changed > 10_000 and lost.rounded_and_kept == 0
    assert run(["convert", fsdp, str(tmp_path / "again"), "--to", "torch_dist", "-v"]) == 0
    said = capsys.readouterr().out
    assert f"{changed:,} elements of weights; the masters keep the exact values" in said
    assert "cast to their new type" not in said


@pytest.mark.parametrize(
    ("beside", "kept"), [((("model", "a"), ("model", "b")), True), ((("model", "a"),), False), ((), False)]
)
def test_a_cast_loses_nothing_where_all_its_source_is_written(beside, kept):
    """Stacked layers of which one alone has a master: what the other one's rounding changes is a loss."""
    catalog = Catalog("", {key: TensorEntry(key, "float32", (2,), ()) for key in ("a", "b")}, {})
    weight = TargetTensor("w", "bfloat16", (2, 2), (Source("a"), Source("b")))
    masters = [TargetTensor(f"{name}.{key}", "float32", (2,), (Source(key),)) for name, key in beside]
    narrow = TargetTensor("again", "float16", (2,), (Source("b"),))  # rounded itself
    found = kept_exactly([weight, *masters, narrow], catalog)
    assert (("w", "a") in found) == any(key == "a" for _, key in beside)
    assert (("w", "b") in found) == kept == (("again", "b") in found)


@pytest.mark.parametrize("to", ["torch_dist", "fsdp_dtensor"])
def test_a_model_of_two_types_keeps_them(to, cases, tmp_path):
    source = cases / "mixed_dtype_rounded" / "hf"
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    weights = TargetOptions(fresh_optimizer=False)
    report = import_hf(source, first, ImportOptions(to=to, fsdp=weights))
    assert report.written is not None and report.written.rounded_elements == 0
    (said,) = [note for note in report.notes if "rounds them" in note]
    norm = "decoder.final_layernorm.weight"
    assert said.startswith(f"7 parameters, {norm} the first, are float32 in a model of bfloat16")
    if to == "torch_dist":
        convert_to_fsdp_dtensor(first, second, ConvertOptions(target=TargetOptions(weights_only=True)))
    else:
        convert_to_torch_dist(first, second, ToTorchDistOptions(target=TorchDistOptions(weights_only=True)))
    truth = oracle.model(source)
    assert {str(tensor.dtype) for tensor in truth.values()} == {"torch.float32", "torch.bfloat16"}
    for number, megatron in enumerate((first, second)):
        export_hf(megatron, tmp_path / f"hf{number}")
        oracle.assert_same(oracle.model(tmp_path / f"hf{number}"), truth)


def test_an_import_in_one_type_says_what_it_rounds(cases, tmp_path):
    source = cases / "mixed_dtype_rounded" / "hf"
    report = import_hf(source, tmp_path / "out", ImportOptions(dtype="bfloat16"))
    norms = [tensor for tensor in oracle.model(source).values() if tensor.dtype == torch.float32]
    changed = sum(int((tensor.bfloat16().float() != tensor).sum()) for tensor in norms)
    assert report.written is not None and report.written.rounded_elements == changed == 448
    assert not any("rounds them" in note for note in report.notes)
    assert report.written.rounded_tensors == 3  # stacked over layers: two norms; and the last one


def test_an_export_in_fp32_takes_the_masters_of_either_format(tmp_path):
    wide = ExportOptions(dtype="float32")
    report = export_hf(RUN, tmp_path / "a", wide)
    assert (report.masters.use, report.masters.mode) == ("written", "sample")
    assert report.masters.found.elements > 0
    convert_to_fsdp_dtensor(RUN, tmp_path / "fsdp")
    other = export_hf(tmp_path / "fsdp", tmp_path / "b", wide)
    assert (other.masters.use, other.masters.found.tensors) == ("as_stored", 0)
    found = oracle.model(tmp_path / "a")
    oracle.assert_same(found, oracle.model(tmp_path / "b"))
    stored = oracle.tensors(LLAMA)
    master = stored[MASTER][1]
    assert oracle.same_bytes(found["model.layers.1.mlp.down_proj.weight"], master)
    assert not oracle.same_bytes(master, stored[LARGE][1].float())
    assert export_hf(RUN, tmp_path / "c").masters.use == "left_out"
    assert json.loads((tmp_path / "a" / "config.json").read_bytes())["torch_dtype"] == "float32"


def test_an_export_in_fp32_says_when_there_are_no_masters(tmp_path):
    parts = read(LLAMA)
    weights = {key: tensor for key, tensor in parts.tensors.items() if not key.startswith("optimizer.")}
    encoded = {
        key: tensor.to(torch.int16) for key, tensor in parts.tensors.items() if key.startswith("optimizer.")
    }
    exports = []
    for name, tensors in (("none", weights), ("encoded", weights | encoded)):
        source = write(tmp_path / name, Parts(tensors, parts.objects, parts.common))
        report = export_hf(source, tmp_path / f"{name} hf", ExportOptions(dtype="float32"))
        assert report.masters.use == ("left_out" if name == "encoded" else "none")
        assert any(
            note.startswith("no fp32 masters are exported, only the stored weights: ")
            for note in report.notes
        )
        exports.append(oracle.model(tmp_path / f"{name} hf"))
    oracle.assert_same(*exports)
    stored = weights[LARGE][1].float()
    assert oracle.same_bytes(exports[0]["model.layers.1.mlp.down_proj.weight"], stored)


def test_an_export_in_fp32_refuses_damaged_masters(tmp_path):
    parts = read(LLAMA)
    parts.tensors[MASTER][1, 3, 5] *= 2
    source = write(tmp_path / "source", parts)
    with pytest.raises(VerificationError, match=r"linear_fc2\.weight\[3, 5\].*\n.*--check-masters none"):
        export_hf(source, tmp_path / "out", ExportOptions(dtype="float32"))
    export_hf(source, tmp_path / "out", ExportOptions(check_masters="none"))


def test_an_import_refuses_what_only_bfloat16_can_hold(tmp_path, cases):
    folder = tmp_path / "hf"
    folder.mkdir()
    source = cases / "mixed_dtype_rounded" / "hf"
    tensors = oracle.model(source)
    tensors["model.norm.weight"][7] = 65520.0  # the first that rounds to infinity
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    options = ImportOptions(to="fsdp_dtensor", dtype="float16", fsdp=TargetOptions(fresh_optimizer=False))
    with pytest.raises(VerificationError, match=r"final_layernorm\.weight\[7\]: 65520\.0"):
        import_hf(folder, tmp_path / "out", options)
    tensors["model.norm.weight"][7] = 65519.0
    save_file(tensors, folder / "model.safetensors")
    import_hf(folder, tmp_path / "out", options)
