"""`--rules`: the file that a user names is used or refused, with a reference config and without."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tools.cli.app import run
from tests.commands.test_huggingface import model
from tests.megatron.huggingface.by_rules import directory
from tests.megatron.huggingface.released import GLM

MINE = """
family: mine
architecture: MineForCausalLM
model_type: TYPE
like: llama
rules:
  - core: decoder.layers.{l}.mlp.linear_fc2.weight
    hf: model.layers.{l}.mlp.my_down.weight
    shape: [hidden, ffn]
    when: [dense]
"""

GLM_RULES = """
family: glm4_moe
architecture: Glm4MoeForCausalLM
like: deepseek_v3
fixed: {partial_rotary_factor: 0.5, attention_bias: true, norm_topk_prob: trueFIXED}
needs: {multi_latent_attention: false, add_qkv_bias: true, rotary_percent: 0.5, qk_layernorm: true}
rules:
  - core: decoder.layers.{l}.self_attention.linear_qkv.bias
    hf: ["model.layers.{l}.self_attn.q_proj.bias", "model.layers.{l}.self_attn.k_proj.bias",
         "model.layers.{l}.self_attn.v_proj.bias"]
    layout: qkv
    shape: [qkv]
    when: [qkv_bias]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama `hf` and its `run`, and rules for one that calls a linear otherwise."""
    model("llama", tmp_path / "hf")
    assert run(["import-hf", str(tmp_path / "hf"), str(tmp_path / "run"), "-q"]) == 0
    (tmp_path / "mine.yaml").write_text(MINE.replace("TYPE", "mine"))
    (tmp_path / "llama.yaml").write_text(MINE.replace("TYPE", "llama"))
    return tmp_path


def test_rules_alone_say_what_the_model_is(folder):
    """Nothing else tells that the parameters of a Llama are those of another class."""
    words = [str(folder / "run"), str(folder / "out"), "--rules", str(folder / "mine.yaml"), "-q"]
    assert run(["export-hf", *words]) == 0
    config = json.loads((folder / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("mine", ["MineForCausalLM"])
    found, plain = (load_file(folder / name / "model.safetensors") for name in ("out", "hf"))
    assert found.keys() == {key.replace("down_proj", "my_down") for key in plain}
    for key, array in plain.items():
        assert found[key.replace("down_proj", "my_down")].tobytes() == array.tobytes(), key


def test_the_way_back_and_both_comparisons_take_the_same_rules(folder):
    rules = ["--rules", str(folder / "mine.yaml"), "-q"]
    out, again, source = (str(folder / name) for name in ("out", "again", "run"))
    assert run(["export-hf", source, out, *rules]) == 0
    assert run(["import-hf", out, again, *rules]) == 0
    for words in ((out, source), (again, out), (again, out, "--headers")):
        assert run(["diff", *words, *rules]) == 0
        assert run(["diff", *words]) == 5  # mine is not known without


@pytest.mark.parametrize("command", ["import-hf hf out", "export-hf run out --hf-config hf", "diff hf run"])
def test_rules_for_another_model_are_refused(command, folder, capsys):
    """They would do nothing: the config.json is not of their model_type."""
    words = [str(folder / word) if word in ("hf", "run", "out") else word for word in command.split()]
    assert run([*words, "--rules", str(folder / "mine.yaml"), "-q"]) == 2
    error = capsys.readouterr().err
    assert "its family is of model_type 'mine', and config.json says 'llama'" in error
    assert "`model_type: llama` in the file says so" in error and not (folder / "out").exists()


def test_rules_for_the_type_of_the_config_are_used(folder):
    tensors = load_file(folder / "hf" / "model.safetensors")
    renamed = {key.replace("down_proj", "my_down"): array for key, array in tensors.items()}
    save_file(renamed, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder / "run")
    rules = ["--rules", str(folder / "llama.yaml"), "-q"]
    assert run(["import-hf", str(folder / "hf"), str(folder / "run"), *rules]) == 0
    assert (
        run(
            ["export-hf", str(folder / "run"), str(folder / "out"), "--hf-config", str(folder / "hf"), *rules]
        )
        == 0
    )
    assert load_file(folder / "out" / "model.safetensors").keys() == renamed.keys()


def test_rules_of_a_comparison_without_a_model_are_refused(folder, capsys):
    source = str(folder / "run")
    assert run(["diff", source, source, "--rules", str(folder / "mine.yaml")]) == 2
    assert "--rules is for a Hugging Face model and a Megatron checkpoint" in capsys.readouterr().err


def test_a_field_that_no_rule_carries_is_asked_for(tmp_path, capsys):
    """Rules that demand Megatron's norms of queries and keys do not say how config.json calls them.

    An export would leave the field out, and the class takes no norms without it. With the line that the refusal
    gives, the rules say what the family file of GLM-4.5 says.
    """
    config = {**GLM, "norm_topk_prob": True, "num_nextn_predict_layers": 0}
    (tmp_path / "hf").mkdir()
    save_file(directory(config), tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    rules, hf, run_dir = tmp_path / "mine.yaml", str(tmp_path / "hf"), str(tmp_path / "run")
    words = ["import-hf", hf, run_dir, "--rules", str(rules), "-q"]
    rules.write_text(GLM_RULES.replace("FIXED", ""))
    assert run(words) == 5 and not Path(run_dir).exists()
    asked = re.search(r"`fixed: \{(.*?)\}` for a field", capsys.readouterr().err)
    assert asked and asked[1] == "use_qk_norm: true"
    rules.write_text(GLM_RULES.replace("FIXED", f", {asked[1]}"))
    assert run(words) == 0
    assert run(["import-hf", hf, str(tmp_path / "known"), "-q"]) == 0
    assert run(["diff", run_dir, str(tmp_path / "known"), "-q"]) == 0
    assert run(["export-hf", run_dir, str(tmp_path / "out"), "--rules", str(rules), "-q"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_qk_norm"] is True
    assert run(["diff", str(tmp_path / "out"), hf, "-q"]) == 0
