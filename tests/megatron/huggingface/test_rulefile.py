"""Rule files: a family of the user's own, and errors that say where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.huggingface.families import FAMILIES
from ckpt_tools.megatron.huggingface.rulefile import load_rule_file
from ckpt_tools.megatron.huggingface.targets import export_targets, import_targets
from tests.megatron.huggingface.materialise import materialise, specs
from tests.megatron.huggingface.test_targets import LLAMA, directory, imported

MINE = """
family: mine
architecture: MineForCausalLM
like: llama
rules:
  - core: decoder.layers.{l}.mlp.linear_fc1.weight
    hf: model.blocks.{l}.ffn.up_and_gate.weight
    layout: same
    shape: [fc1, hidden]
    when: [dense]
  - core: decoder.layers.{l}.self_attention.core_attention.softmax_offset
    hf: ['model.layers.{l}.self_attn.sink']
    shape: [heads]
ignored: ['model\\.layers\\.\\d+\\.note']
"""


def test_a_family_of_ones_own(tmp_path: Path) -> None:
    """Llama with fc1 in one tensor and attention sinks, both ways."""
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    family = load_rule_file(path)
    families = {**FAMILIES, family.name: family}
    config = {**LLAMA, "model_type": "mine"}
    plain = directory(LLAMA)
    tensors = {key: array for key, array in plain.items() if "gate_proj" not in key and "up_proj" not in key}
    for layer in range(2):
        tensors[f"model.blocks.{layer}.ffn.up_and_gate.weight"] = directory(LLAMA, 1)[
            "lm_head.weight"
        ].repeat(2, 0)[:20]
        tensors[f"model.layers.{layer}.self_attn.sink"] = plain["model.norm.weight"][:4]
        tensors[f"model.layers.{layer}.note"] = plain["model.norm.weight"]
    found = import_targets(specs(tensors), config, families=families)
    megatron = materialise(found.tensors, tensors)
    assert "decoder.layers.1.self_attention.core_attention.softmax_offset" in megatron
    exported = export_targets(specs(megatron), found.args, config, families=families)
    assert exported.config["architectures"] == ["MineForCausalLM"] and exported.config["model_type"] == "mine"
    again = materialise(exported.tensors, megatron)
    assert again.keys() == {key for key in tensors if not key.endswith("note")}
    assert all(again[key].tobytes() == tensors[key].tobytes() for key in again)


def test_rules_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("family: mine\nlike: llama\nwithout: [output_layer.weight]\n")
    _, megatron = imported(LLAMA, directory(LLAMA))
    kept = {rule.core for rule in load_rule_file(path).rules}
    assert "output_layer.weight" in megatron and "output_layer.weight" not in kept
    assert len(kept) == len({rule.core for rule in FAMILIES["llama"].rules}) - 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "expected a mapping @ $"),
        ("family: x\nlike: lama", "'lama' is not one of"),
        ("like: llama", "missing @ $.family"),
        ("family: 3", "expected str, found 3 @ $.family"),
        ("family: x\ncolour: red", "unknown key @ $.colour"),
        ("family: x\nneeds: {swigloo: true}", "unknown setting @ $.needs.swigloo"),
        ("family: x\nignored: ['(']", "not a regular expression @ $.ignored[0]"),
        ("family: x\nwithout: [nothing]", "no rule for 'nothing' to leave out @ $.without[0]"),
        ("family: x\nrules: [1]", "expected a mapping @ $.rules[0]"),
        ("family: x\nrules: [{core: a, hf: b, shape: [hidden], layout: sideways}]",
         "'sideways' is not one of same"),
        ("family: x\nrules: [{core: a, hf: b, shape: [hidden], layout: qkv}]",
         "layout qkv has 3 tensors, found 1 @ $.rules[0].hf"),
        ("family: x\nrules: [{core: a, hf: b, shape: [hiden]}]", "@ $.rules[0].shape[0]"),
        ("family: x\nrules: [{core: a, hf: b}]", "expected a text or a list of texts, found None @ $.rules[0].shape"),
        ("family: x\nrules: [{core: a, hf: b, shape: [hidden], when: [never]}]", "@ $.rules[0].when[0]"),
        ("family: x\nrules: [{core: 'a.{l}', hf: b, shape: [hidden]}]",
         "'b' has other placeholders than 'a.{l}' @ $.rules[0].hf[0]"),
        ("family: [", "while parsing"),
    ],
)  # fmt: skip
def test_errors_name_their_place(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_rule_file(path)
    assert problem in str(caught.value)
