"""Rule files: a family of the user's own, and errors that say where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.megatron.huggingface.config.config import read_config, write_config
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, Families, load_rule_file
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets, import_targets
from tests.megatron.huggingface.by_rules import LLAMA, assert_same, directory, exported, imported
from tests.megatron.huggingface.materialise import materialise, specs
from tests.megatron.huggingface.released import GLM, HYBRIDS

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

NESTED_LLAMA = """
family: mine
model_type: llama
architecture: LlamaForCausalLM
fields: [dense, linear_bias, rope_parameters]
fixed: [silu]
needs: [gqa, dense, full_attention, no_qk_norm]
rules: [ends, self_attention, projection_bias, mlp, mlp_bias]
"""
PARTIAL = NESTED_LLAMA.replace("rope_parameters", "partial_rope_parameters").replace("[gqa", "[partial_gqa")
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def of_text(text: str, folder: Path) -> Families:
    path = folder / "rules.yaml"
    path.write_text(text)
    return Families(load_rule_file(path))


def test_a_family_like_another_takes_the_piece_too(tmp_path: Path) -> None:
    text = "family: mine\narchitecture: Mine\nlike: llama\nfields: [rope_parameters]\n"
    fields = of_text(text, tmp_path)["mine"].config_fields
    assert "rope_parameters" in fields and "hidden_size" in fields and "rope_theta" not in fields


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "linear", "factor": 2.0}, YARN, {**YARN, "rope_type": "yarn"}]
)
def test_rope_parameters_are_read_in_either_spelling_and_written_as_one(
    scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    families = of_text(NESTED_LLAMA, tmp_path)
    of_4 = {**LLAMA, "rope_theta": 500.0, "rope_scaling": scaling}
    plain = {key: value for key, value in (scaling or {"rope_type": "default"}).items() if key != "type"}
    nested = {"rope_type": "yarn", **plain, "rope_theta": 500.0}
    of_5 = {**{key: value for key, value in LLAMA.items() if "rope" not in key}, "rope_parameters": nested}
    tensors = directory(of_5, families=families)
    for config in (of_4, of_5):
        found, megatron = imported(config, tensors, families=families)
        assert found.args["rotary_base"] == 500.0 and not [one for one in found.notes if "not known" in one]
        made, again = exported(megatron, found.args, config, families=families)
        assert_same(again, tensors)
        written = made.config["rope_parameters"]
        assert {key: written[key] for key in nested} == nested
        assert not {"rope_theta", "rope_scaling"} & made.config.keys()
    both = {**of_5, "rope_theta": 1e4}
    with pytest.raises(MappingError, match=r"rope_theta is 10000\.0, but rope_parameters has 500\.0"):
        imported(both, tensors, families=families)
    half = {**of_5, "rope_parameters": {**nested, "partial_rotary_factor": 0.5}}
    with pytest.raises(
        MappingError, match=r"partial_rotary_factor is 0\.5: only a part of each head is rotated"
    ):
        imported(half, tensors, families=families)


def test_a_part_of_each_head_in_rope_parameters(tmp_path: Path) -> None:
    families = of_text(PARTIAL, tmp_path)
    nested = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    config = {**{key: value for key, value in LLAMA.items() if "rope" not in key}, "rope_parameters": nested}
    tensors = directory(config, families=families)
    found, megatron = imported(config, tensors, families=families)
    assert found.args["rotary_percent"] == 0.5
    assert exported(megatron, found.args, config, families=families)[0].config["rope_parameters"] == nested
    for name in ("rope_theta", "partial_rotary_factor"):
        less = {key: value for key, value in nested.items() if key != name}
        with pytest.raises(MappingError, match=f"rope_parameters: {name} is missing in it"):
            imported({**config, "rope_parameters": less}, tensors, families=families)


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


QKV = """
  - {core: "decoder.layers.{l}.self_attention.linear_qkv.weight", layout: qkv, shape: [qkv, hidden],
     hf: ["model.layers.{l}.self_attn.q_proj.weight", "model.layers.{l}.self_attn.k_proj.weight",
          "model.layers.{l}.self_attn.v_proj.weight"]}
  - {core: "decoder.layers.{l}.self_attention.linear_qkv.bias", layout: qkv, shape: [qkv], when: [qkv_bias],
     hf: ["model.layers.{l}.self_attn.q_proj.bias", "model.layers.{l}.self_attn.k_proj.bias",
          "model.layers.{l}.self_attn.v_proj.bias"]}
  - {core: "decoder.layers.{l}.self_attention.linear_proj.weight", hf: "model.layers.{l}.self_attn.o_proj.weight",
     shape: [hidden, query]}
  - {core: "decoder.layers.{l}.self_attention.q_layernorm.weight", hf: "model.layers.{l}.self_attn.q_norm.weight",
     shape: [head_dim], when: [qk_norm], norm: true}
  - {core: "decoder.layers.{l}.self_attention.k_layernorm.weight", hf: "model.layers.{l}.self_attn.k_norm.weight",
     shape: [head_dim], when: [qk_norm], norm: true}
"""
LATENT = (
    "linear_q_proj.weight",
    "linear_q_down_proj.weight",
    "linear_q_up_proj.layer_norm_weight",
    "linear_q_up_proj.weight",
    "linear_kv_down_proj.weight",
    "linear_kv_up_proj.layer_norm_weight",
    "linear_kv_up_proj.weight",
)
NO_MLA = "".join(f"\n  - decoder.layers.{{l}}.self_attention.{name}" for name in LATENT)
GLM_BY_RULES = """
family: glm4_moe
architecture: Glm4MoeForCausalLM
like: deepseek_v3
FIELDS
defaults: {n_group: 1, topk_group: 1}
needs: {multi_latent_attention: false, add_qkv_bias: true, rotary_percent: 0.5, qk_layernorm: true}
"""
DEMANDED = "fixed: {partial_rotary_factor: 0.5, attention_bias: true, use_qk_norm: true}"


@pytest.mark.parametrize("rules", [f"rules:{QKV}\nwithout:{NO_MLA}\n", ""])
def test_another_attention_than_that_of_the_known_family(rules: str, tmp_path: Path) -> None:
    """GLM-4.5 by a rule file alone, prediction layer included, gives what the built-in family gives."""
    path = tmp_path / "glm.yaml"
    tensors = directory(GLM)
    known, _ = imported(GLM, tensors)
    path.write_text(GLM_BY_RULES.replace("FIELDS", DEMANDED) + rules)
    families = {"glm4_moe": load_rule_file(path)}
    found = import_targets(specs(tensors), GLM, families=families)
    assert {one.key: one for one in found.tensors} == {one.key: one for one in known.tensors}
    assert found.args == known.args
    megatron = materialise(found.tensors, tensors)
    exported = export_targets(specs(megatron), found.args, GLM, families=families)
    wanted = export_targets(specs(megatron), known.args, GLM).config
    assert exported.config.items() >= wanted.items()  # and what DeepSeek's config.json has beyond it
    again = materialise(exported.tensors, megatron)
    assert_same(again, tensors)


def test_a_setting_of_the_config_that_no_rule_says_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "glm.yaml"
    path.write_text(GLM_BY_RULES.replace("FIELDS", DEMANDED.replace(", use_qk_norm: true", "")))
    with pytest.raises(MappingError) as caught:
        import_targets(specs(directory(GLM)), GLM, families={"glm4_moe": load_rule_file(path)})
    assert "use_qk_norm is True" in str(caught.value) and "lora" not in str(caught.value)


OF_QWEN = """
family: glm4_moe
architecture: Glm4MoeForCausalLM
like: qwen3_moe
"""


def test_fields_of_a_config(tmp_path: Path) -> None:
    """Carried both ways; a field that a known family has brings its translation along."""
    path = tmp_path / "glm.yaml"
    path.write_text(OF_QWEN)
    families = {"glm4_moe": load_rule_file(path)}
    with pytest.raises(
        MappingError, match=r"num_experts is missing; its fields are those of qwen3_moe, and `fields`"
    ):
        import_targets(specs(directory(GLM)), GLM, families=families)
    path.write_text(
        OF_QWEN
        + "fields:\n  num_experts: null\n  n_routed_experts: num_experts\n  mlp_only_layers: null\n"
        + "  decoder_sparse_step: null\n  first_k_dense_replace: {setting: moe_layers, default: 1}\n"
        + "  attention_bias: {setting: add_qkv_bias, default: false}\n"
        + "  partial_rotary_factor: {setting: rotary_percent, default: 0.5}\n"
    )
    family = load_rule_file(path)
    config = {key: value for key, value in GLM.items() if key != "partial_rotary_factor"}
    model = read_config(family, config)
    assert (model.num_experts, model.moe_layers, model.rotary_percent) == (3, (0, 1), 0.5)
    written = write_config(family, model)
    assert written["n_routed_experts"] == 3 and written["first_k_dense_replace"] == 1
    assert written["partial_rotary_factor"] == 0.5 and "num_experts" not in written


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "expected a mapping @ $"),
        ("family: x\nlike: lama", "'lama' is not one of the families; did you mean llama"),
        ("like: llama", "missing @ $.family"),
        ("family: 3", "expected str, found 3 @ $.family"),
        ("family: x\ncolour: red", "unknown key @ $.colour"),
        ("family: x\nneeds: {swigloo: true}", "unknown setting @ $.needs.swigloo"),
        ("family: x\nfields: {a: 3}", "expected a setting, a mapping or null, found 3 @ $.fields.a"),
        ("family: x\nfields: {a: {setting: swigloo}}", "unknown setting 'swigloo' @ $.fields.a"),
        ("family: x\nfields: {a: {setting: kv_channels, colour: 1}}", "unknown key @ $.fields.a.colour"),
        ("family: x\nfields: {a: moe_layers}", "known are decoder_sparse_step, first_k_dense_replace"),
        ("family: x\nfields: {a: null}", "llama has no such field to leave out @ $.fields.a"),
        ("family: x\nignored: ['(']", "not a regular expression @ $.ignored[0]"),
        ("family: x\nwithout: [nothing]", "no rule for 'nothing' to leave out @ $.without[0]"),
        ("family: x\nrules: [1]", "expected a mapping @ $.rules[0]"),
        ("family: x\nrules: [{core: a, hf: b, shape: [hidden], layout: sideways}]",
         "'sideways' is not one of the layouts; known are same"),
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


DOWN = "core: 'decoder.layers.{l}.mlp.linear_fc2.weight', hf: <layer>mlp.down_proj.weight, shape: [hidden, hidden]"
NORM = "core: decoder.final_layernorm.weight, hf: model.norm.weight, shape: [hidden]"
QKV = (
    "core: 'decoder.layers.{l}.self_attention.linear_qkv.weight', layout: qkv, hf: "
    "[<layer>self_attn.q_proj.weight, <layer>self_attn.k_proj.weight, <layer>self_attn.v_proj.weight], shape: "
)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (
            DOWN,
            "config.json asks by hidden x hidden, $.rules[0] (line 5) of the rule file, for [12",
        ),
        (
            f"{QKV}[hidden, hidden]",
            "layout qkv does not fit [12, 12] (hidden x hidden), $.rules[0] (line 5) of the",
        ),
        (
            f"{QKV}[qkv_gate, hidden]",
            "layout qkv does not fit [48, 12] (qkv_gate x hidden), $.rules[0] (line 5)",
        ),
        (f"{NORM}, layout: transposed", "layout transposed does not fit [12] (hidden), $.rules[0] (line 5)"),
        (
            f"{NORM}, layout: halves_swapped",
            "layout halves_swapped does not fit [12] (hidden), $.rules[0] (line 5)",
        ),
    ],
)
def test_sizes_that_do_not_fit_name_the_rule(rule: str, problem: str, tmp_path: Path) -> None:
    families = of_text(f"family: mine\nlike: llama\narchitecture: Mine\nrules:\n  - {{{rule}}}\n", tmp_path)
    tensors = directory(LLAMA)
    with pytest.raises(MappingError) as caught:
        imported({**LLAMA, "model_type": "mine"}, tensors, families=families)
    assert problem in str(caught.value)
    found, megatron = imported(LLAMA, tensors)
    with pytest.raises(MappingError) as caught:
        exported(megatron, found.args, {**LLAMA, "model_type": "mine"}, families=families)
    assert problem.replace("config.json asks", "its settings ask") in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "config", "lines"),
    [
        ({"use_mup": True}, {}, ["`needs: {use_mup: true}`", "`fixed: {NAME: VALUE}`"]),
        ({}, {"use_qk_norm": True}, ["`needs: {NAME: VALUE}`", "`fixed: {use_qk_norm: true}`"]),
        (
            {"use_mup": True, "no_rope_freq": [0, 1]},  # a list is said in the problem's own line
            {"use_qk_norm": True},
            ["no_rope_freq is [0, 1]", "`needs: {use_mup: true}`", "`fixed: {use_qk_norm: true}`"],
        ),
    ],
)
def test_a_refusal_names_the_line_to_add(
    settings: dict[str, Any], config: dict[str, Any], lines: list[str]
) -> None:
    found, megatron = imported(LLAMA, directory(LLAMA))
    with pytest.raises(MappingError) as caught:
        export_targets(specs(megatron), {**found.args, **settings}, LLAMA | config)
    assert all(line in str(caught.value) for line in lines)


@pytest.mark.parametrize(
    ("line", "place", "number"),
    [
        ("defaults: {rope_theta: 1.0e6}", "$.defaults.rope_theta", "1.0e+6"),
        ("fixed: [{clip: 1e-5}]", "$.fixed[0].clip", "1.0e-5"),
        ("fixed: {scale: {one_of: [1.0, -2.5E3]}}", "$.fixed.scale.one_of[1]", "-2.5e+3"),
        ("needs: {rotary_base: 1e4}", "$.needs.rotary_base", "1.0e+4"),
        (
            "fields: {rope_theta: {setting: rotary_base, default: 1e6}}",
            "$.fields.rope_theta.default",
            "1.0e+6",
        ),
    ],
)
def test_numbers_that_are_texts_to_yaml(line: str, place: str, number: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"family: mine\narchitecture: Mine\n{line}\n")
    with pytest.raises(UsageError) as refused:
        load_rule_file(path)
    assert f"is a text to YAML; write {number} @ {place} (line 3)" in str(refused.value)
    assert isinstance(yaml.safe_load(number), float)


def test_prediction_layers_can_be_left_out(tmp_path: Path) -> None:
    """Those of a HybridModel have no rules."""
    families = of_text(
        "family: own\nlike: nemotron_h\nmodel_type: nemotron_h\nfixed: {num_nextn_predict_layers: 1}\n"
        "ignored: ['mtp\\..*']\n",
        tmp_path,
    )
    config = {**HYBRIDS["nemotron_3"], "num_nextn_predict_layers": 1}
    tensors = {
        **directory(HYBRIDS["nemotron_3"]),
        "mtp.layers.0.eh_proj.weight": np.zeros((12, 24), np.float32),
    }
    found = import_targets(specs(tensors), config, families=families)
    assert found.dropped == ("mtp.layers.0.eh_proj.weight",) and found.args["mtp_num_layers"] is None
