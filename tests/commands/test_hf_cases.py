"""Inputs of Hugging Face conversions that once went wrong (tests/data/README.md), through the commands."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tools import ExportOptions
from ckpt_tools.cli.app import run
from ckpt_tools.commands.huggingface.export_hf import plan_export
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.megatron.huggingface.config.model_args import GluInterleave
from ckpt_tools.megatron.huggingface.mapping.layouts import gate_up_in_turns
from tests.megatron.huggingface.by_rules import LLAMA, directory
from tests.megatron.huggingface.test_layouts import model, numbered, to_core, to_hf

YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False}


def config_of(source: Path, reference: Path | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """config.json of an export, and what is said about it."""
    with open_checkpoint(str(source)) as opened:
        planned = plan_export(opened, ExportOptions(hf_config=str(reference) if reference else None))
        return json.loads(planned.extra_files["config.json"]), planned.target.notes


@pytest.mark.parametrize(
    ("case", "setting"),
    [("args_nope", "no_rope_freq is [0, 1]"), ("args_mup", "use_mup is True"),
     ("args_post_ln_residual", "apply_residual_connection_post_layernorm is True"),
     ("args_probs_on_input", "moe_apply_probs_on_input is True"),
     ("args_glu_linear_offset", "glu_linear_offset is 1.0")],
)  # fmt: skip
def test_settings_that_config_json_cannot_say(case, setting, cases, tmp_path, capsys):
    assert run(["export-hf", str(cases / case), str(tmp_path / "out")]) == 5
    error = capsys.readouterr().err
    assert setting in error and "--rules" in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [("safetensors_alias/tied_llama", 0, "lm_head.weight: redundant"),
     ("classification_heads/hf_reward_model", 5, "score.weight [1, 32]: the head of a reward, value or"),
     ("vl_head_lost/qwen2_5_vl", 5, "lm_head.weight [64, 32] is missing")],
)  # fmt: skip
def test_models_as_users_have_them(case, code, message, user_cases, tmp_path, capsys):
    source, out = str(user_cases / case), str(tmp_path / "run")
    assert run(["import-hf", source, out]) == code
    said = "".join(capsys.readouterr())
    assert message in said and (code == 0 or said.count("\n  - ") == 1)
    assert code or run(["diff", source, out, "-q"]) == 0


@pytest.mark.parametrize("case", ["theta_both", "yarn_and_null"])
def test_two_rotary_embeddings_in_one_config(case, cases, tmp_path, capsys):
    """On import, and as the reference of an export."""
    config = json.loads((cases / "rope_conflict" / case / "config.json").read_text())
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file(
        directory({k: v for k, v in config.items() if k != "rope_parameters"}), hf / "model.safetensors"
    )
    (hf / "config.json").write_text(json.dumps(config))
    assert run(["import-hf", str(hf), str(tmp_path / "out")]) == 5
    assert "rope_parameters has" in capsys.readouterr().err
    del config["rope_parameters"]
    (hf / "config.json").write_text(json.dumps(config))
    assert run(["import-hf", str(hf), str(tmp_path / "run")]) == 0
    reference = ["--hf-config", str(cases / "rope_conflict" / case)]
    assert run(["export-hf", str(tmp_path / "run"), str(tmp_path / "again"), *reference]) == 5
    assert "rope_parameters has" in capsys.readouterr().err


def test_a_reference_with_another_rotary_base(tmp_path, capsys):
    hf, other = tmp_path / "hf", tmp_path / "other"
    for folder, theta in ((hf, 10000.0), (other, 500000.0)):
        folder.mkdir()
        save_file(directory(LLAMA), folder / "model.safetensors")
        (folder / "config.json").write_text(
            json.dumps({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": theta}})
        )
    assert run(["import-hf", str(hf), str(tmp_path / "run")]) == 0
    arguments = ["export-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--hf-config"]
    assert run([*arguments, str(other)]) == 5
    assert "rope_theta: the checkpoint has 10000.0, the reference config 500000.0" in capsys.readouterr().err
    assert run([*arguments, str(hf)]) == 0


@pytest.mark.parametrize("with_reference", [False, True])
def test_gemma3_of_bridge(with_reference, cases):
    """Two bases, a window, a softmax scale: all from the checkpoint."""
    case = cases / "gemma3_bridge_rotary_base"
    reference = json.loads((case / "hf" / "config.json").read_text())
    config, _ = config_of(case / "run", case / "hf" if with_reference else None)
    for name in ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window", "sliding_window_pattern",
                 "query_pre_attn_scalar", "head_dim", "rms_norm_eps", "vocab_size", "model_type"):  # fmt: skip
        assert config[name] == reference[name], name
    assert isinstance(config["query_pre_attn_scalar"], int) and isinstance(
        config["rope_local_base_freq"], float
    )


@pytest.mark.parametrize("field", ["rope_theta", "rope_local_base_freq", "sliding_window", "query_pre_attn_scalar",
                                   "sliding_window_pattern"])  # fmt: skip
def test_a_reference_that_contradicts_gemma3(field, cases, tmp_path):
    case = cases / "gemma3_bridge_rotary_base"
    config = json.loads((case / "hf" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: 2 * config[field]}))
    assert run(["export-hf", str(case / "run"), str(tmp_path / "out"), "--hf-config", str(tmp_path)]) == 5


def test_linear_scaling_of_gemma3_is_its_factor(cases, tmp_path):
    """rope_scaling_factor divides the frequencies of the global layers, whatever `rope_scaling` says."""
    source = tmp_path / "run"
    shutil.copytree(cases / "gemma3_bridge_rotary_base" / "run", source)
    settings = source / "iter_0000000" / "run_config.yaml"
    settings.write_text(settings.read_text().replace("rope_scaling_factor: 1.0", "rope_scaling_factor: 8.0"))
    assert config_of(source, None)[0]["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(("with_reference", "length"), [(False, 131072), (True, 4096)])
def test_enable_gpt_oss_is_yarn(with_reference, length, cases):
    """Megatron-LM computes with 131072, the released models with 4096: the one that counts is said."""
    case = cases / "enable_gpt_oss"
    config, notes = config_of(case / "run", case / "hf" if with_reference else None)
    assert config["rope_scaling"] == {**YARN, "original_max_position_embeddings": length}
    assert (config["swiglu_limit"], config["sliding_window"]) == (7.0, 8)
    assert any(f"{length} is written" in note for note in notes)


@pytest.mark.parametrize(("run_of", "hf"), [("run", "hf"), ("run_v2lite", "hf_v2lite")])
def test_one_group_of_experts_is_none(run_of, hf, cases):
    case = cases / "n_group_1_reference"
    for reference in (case / hf, None):
        config, notes = config_of(case / run_of, reference)
        assert (config["n_group"], config["topk_group"]) == (1, 1)
        assert not [note for note in notes if "routing" in note or "not known" in note]


def test_a_reference_with_the_older_word_keeps_it_for_its_own_code(cases):
    case = cases / "n_group_1_reference"
    config, _ = config_of(case / "run_v2lite", case / "hf_v2lite")
    assert config["rope_scaling"]["type"] == config["rope_scaling"]["rope_type"] == "yarn"
    assert "auto_map" in config


def test_interleaved_experts_export_as_contiguous_ones(cases, tmp_path):
    for form in ("contiguous", "interleaved"):
        assert run(["export-hf", str(cases / "glu_interleave" / form), str(tmp_path / form)]) == 0
    ours, theirs = (tmp_path / form / "model.safetensors" for form in ("interleaved", "contiguous"))
    assert ours.read_bytes() == theirs.read_bytes()
    data = [cases / "glu_interleave" / form / "__0_0.distcp" for form in ("interleaved", "contiguous")]
    assert data[0].read_bytes() != data[1].read_bytes()


@pytest.mark.parametrize(("block", "parts"), [(2, 1), (2, 3), (4, 1), (1, 2), (12, 1)])
def test_gate_and_up_rows_in_turns(block, parts):
    """What each rank's kernel takes apart, from the halves in which its rows were stored."""
    gate, up = numbered(12, 3), -1 - numbered(12, 3)
    ranks = [
        np.stack([g.reshape(-1, block, 3), u.reshape(-1, block, 3)], axis=1).reshape(-1, 3)
        for g, u in zip(np.split(gate, parts), np.split(up, parts), strict=True)
    ]
    stored = np.concatenate([np.split(rows, 2)[half] for half in (0, 1) for rows in ranks])
    layout = gate_up_in_turns(stored.shape, model(glu_interleave=GluInterleave(block, parts)))
    ours = to_hf(layout, stored)
    assert ours[0].tobytes() == gate.tobytes() and ours[1].tobytes() == up.tobytes()
    assert to_core(layout, ours, stored.shape, filled=False).tobytes() == stored.tobytes()
