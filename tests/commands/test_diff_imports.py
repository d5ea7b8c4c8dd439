"""Imports of models as people have them, compared with what they were made from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools.commands.check.diff import diff_checkpoints
from ckpt_tools.commands.check.sides import DiffRequest
from ckpt_tools.commands.convert.to_fsdp_dtensor import convert_to_fsdp_dtensor
from ckpt_tools.commands.huggingface.export_hf import export_hf
from ckpt_tools.commands.huggingface.import_hf import ImportOptions, import_hf
from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.model.choices import MegatronFormat
from ckpt_tools.verify.compare.differences import DiffOptions
from tests.cases import cases as cases  # noqa: PLC0414  a fixture
from tests.conftest import DATA

NAMES = ["mixed_dtype_rounded", "mistral_consolidated", "moonlight_inv_freq"]
RUN = DATA / "core019_llama_tp2_fully_reshardable"


@pytest.mark.parametrize("to", ["torch_dist", "fsdp_dtensor"])
@pytest.mark.parametrize("name", NAMES)
def test_an_import_equals_its_source(name: str, to: MegatronFormat, cases: Path, tmp_path: Path) -> None:
    source, run = str(cases / name / "hf"), str(tmp_path / "run")
    import_hf(source, run, ImportOptions(to=to, fsdp=TargetOptions(fresh_optimizer=False)))
    for a, b in ((source, run), (run, source)):
        report = diff_checkpoints(a, b, DiffOptions(ignore=("*e_score_correction_bias",)))
        assert report.by == "huggingface" and report.is_equal
        assert len(report.tensors) > 20
    left_out = [note for note in report.notes if "rotary frequencies" in note]
    assert len(left_out) == (3 if name == "moonlight_inv_freq" else 0)


def test_one_changed_element_is_found_where_it_is(cases: Path, tmp_path: Path) -> None:
    source = cases / "mixed_dtype_rounded" / "hf"
    import_hf(str(source), str(tmp_path / "run"))
    changed = tmp_path / "changed"
    shutil.copytree(source, changed)
    tensors = load_file(source / "model.safetensors")
    key = "model.layers.2.self_attn.k_proj.weight"
    tensors[key][5, 7] += 1
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(tensors, changed / "model.safetensors")
    report = diff_checkpoints(str(changed), str(tmp_path / "run"))
    found = {t.name: t for t in report.tensors if t.kind != "equal"}
    kinds = {name: t.kind for name, t in found.items()}
    assert kinds == {
        key: "values",
        "model.norm.weight": "only in B",
        "model.layers.0.self_attn.q_proj.bias": "only in A",
    }
    assert found[key].found.different == 1


def test_a_real_run_and_its_export(tmp_path: Path) -> None:
    export_hf(str(RUN), str(tmp_path / "hf"))
    convert_to_fsdp_dtensor(str(RUN), str(tmp_path / "fsdp"))
    for megatron in (RUN, tmp_path / "fsdp"):
        assert diff_checkpoints(str(megatron), str(tmp_path / "hf")).is_equal


def test_models_that_cannot_be_the_same_are_refused(cases: Path, tmp_path: Path) -> None:
    with pytest.raises(MappingError):
        diff_checkpoints(str(RUN), str(cases / "moonlight_inv_freq" / "hf"))
    plain = str(cases / "mixed_dtype_rounded" / "hf")
    with pytest.raises(UsageError, match="--by parameters"):
        diff_checkpoints(plain, plain, request=DiffRequest(by="parameters"))
    assert diff_checkpoints(plain, plain).by == "keys"
