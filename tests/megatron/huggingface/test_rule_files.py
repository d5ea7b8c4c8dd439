"""Families in files: those that are known, those of a user's own, both ways, and errors that say where they are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from ckpt_tools.cli.app import run
from ckpt_tools.errors import CkptError, MappingError, UsageError
from ckpt_tools.megatron.huggingface.config.codecs import DEFAULTS, FORMS
from ckpt_tools.megatron.huggingface.config.config import read_config, write_config
from ckpt_tools.megatron.huggingface.families import families as known
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, FOLDER, Families, load_rule_file
from ckpt_tools.megatron.huggingface.families.file_places import first_line
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.families.rule_items import pieces
from ckpt_tools.megatron.huggingface.mapping.layouts import JOINED, LAYOUTS
from ckpt_tools.megatron.huggingface.mapping.rules import Family, OneOf
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets, import_targets
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language, vision_language_types
from tests.conftest import REPO
from tests.megatron.huggingface import rule_page
from tests.megatron.huggingface.by_rules import (
    BASE,
    DEEPSEEK,
    LLAMA,
    assert_same,
    directory,
    exported,
    imported,
    materialise,
    problems,
    specs,
)
from tests.megatron.huggingface.family_table import GIVEN, INSIDE, PAGE, classes, page
from tests.megatron.huggingface.models import CONFIGS, NOT_IN_MEGATRON, family_of, installed
from tests.megatron.huggingface.released import GLM, HYBRIDS, RELEASED
from tests.megatron.huggingface.vision_language import KINDS
from tests.peers.test_vision_language import CASES as BRIDGE

# The files of the package.

EXAMPLE = REPO / "example-scripts" / "huggingface_family.yaml"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_known_family_is_a_file_as_a_user_may_write_it(name):
    family = load_rule_file(FOLDER / f"{name}.yaml")
    assert family == FAMILIES[name]
    assert not family.like and len(family.rules) > 5 and len(family.fields) > 8


def test_only_the_file_that_a_config_names_is_parsed(monkeypatch):
    own, parse, read = load_rule_file(EXAMPLE), known._family, []

    def seen(name: str) -> Family:
        read.append(name)
        return parse(name)

    monkeypatch.setattr(known, "_family", seen)
    for kind, name in (("kimi_k2", "deepseek_v3"), ("gemma3_text", "gemma3"), ("llama", "llama")):
        assert family_of_config({"model_type": kind}).name == name
        assert family_of_config({"model_type": kind}, Families(own)).name == name
    assert family_of_config({"model_type": "arcee"}, Families(own)) is own
    assert read == ["deepseek_v3"] * 2 + ["gemma3"] * 2 + ["llama"] * 2
    assert (
        next(iter(Families(replace(own, name="gpt2")))) == "gpt2" and len(Families(own)) == len(FAMILIES) + 1
    )


def test_the_example_converts_a_model(tmp_path, capsys):
    """By the commands, both ways: the same bytes under the same names, and the same config.json."""
    config = {**BASE, "model_type": "arcee", "hidden_act": "relu2", "mlp_bias": True, "attention_bias": True}
    tensors = directory(config, families=Families(load_rule_file(EXAMPLE)))
    assert tensors["model.layers.1.mlp.up_proj.bias"].shape == (10,) and len(tensors) == 3 + 2 * 14
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), source / "model.safetensors")
    words = ["--rules", str(EXAMPLE)]
    assert run(["import-hf", str(source), str(tmp_path / "megatron"), *words]) == 0, capsys.readouterr().err
    assert run(["export-hf", str(tmp_path / "megatron"), str(tmp_path / "out"), *words,
                "--hf-config", str(source)]) == 0, capsys.readouterr().err  # fmt: skip
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(again, tensors)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.items() >= config.items() and written["architectures"] == ["ArceeForCausalLM"]


def test_a_file_of_another_name_than_its_family_is_a_fault_of_ours(tmp_path, monkeypatch):
    (tmp_path / "lama.yaml").write_text((FOLDER / "llama.yaml").read_text())
    monkeypatch.setattr(known, "FOLDER", tmp_path)
    caches = (known.family_names, known._text, known._family)
    for one in caches:
        one.cache_clear()
    try:
        with pytest.raises(CkptError, match=r"lama\.yaml does not say the family lama"):
            FAMILIES["lama"]
    finally:
        for one in caches:
            one.cache_clear()


def parts(kind: str) -> list[Any]:
    """Names of pieces and what stands in full, of every family and every piece."""
    files = [yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")]
    lists = [*(data.get(kind, []) for data in files), *pieces().data[kind].values()]
    return [part for one in lists for part in (one if isinstance(one, list) else [one])]


def test_every_piece_is_used_and_no_rule_is_written_twice():
    """By a family, or by another piece; but for those that only rule files name."""
    unused = {
        name
        for kind in ("rules", "fields", "needs", "fixed", "copies")
        for name in pieces().data[kind].keys() - {part for part in parts(kind) if isinstance(part, str)}
    }
    assert unused == {"rope_parameters", "partial_rope_parameters"}
    whole = (FOLDER.parent / "pieces.yaml").read_text()
    assert [name for name in pieces().data["names"] if f"<{name}>" not in whole] == []
    rules = [json.dumps(part, sort_keys=True) for part in parts("rules") if isinstance(part, dict)]
    assert [rule for rule in set(rules) if rules.count(rule) > 1] == []


def test_pages_are_what_the_tables_make():
    """Otherwise: `python -m tests.megatron.huggingface.family_table`, or `rule_page`. No word lacks a meaning."""
    assert PAGE.read_text() == page() and rule_page.PAGE.read_text() == rule_page.page()
    made = (*DEFAULTS.values(), *JOINED.values(), *(one for _, one in LAYOUTS.values()))
    assert all([*(one.says for one in FORMS.values()), *map(first_line, made)])


def test_every_family_is_tested_both_ways():
    """As a tiny model of transformers, or by its rules alone."""
    tiny = {family_of(variant) for variant in CONFIGS}
    released = {family_of_config(config).name for config in RELEASED.values()}
    assert tiny | released | INSIDE.keys() == FAMILIES.keys()
    assert GIVEN.keys() <= tiny and CONFIGS.keys() >= set(NOT_IN_MEGATRON)
    assert {kind for names in classes().values() for kind in names} == {kind for kind, _ in CONFIGS.values()}
    ruled = {name for name in vision_language_types() if vision_language(name).rules}
    assert ruled == KINDS.keys() and BRIDGE.keys() <= ruled


def test_the_classes_of_a_release_are_those_that_are_recorded():
    transformers = pytest.importorskip(
        "transformers", reason="the optional peer transformers is not installed"
    )
    assert classes()[transformers.__version__] == {kind for kind, _ in installed().values()}


def test_what_a_class_takes_without_a_field_counts_for_the_fields_read_with_it():
    """DeepSeek-V3 without n_group has groups of experts; GPT-OSS without rope_scaling has YaRN."""
    model = read_config(FAMILIES["deepseek_v3"], {k: v for k, v in DEEPSEEK.items() if k != "n_group"})
    assert (model.moe_router_num_groups, model.moe_router_group_topk) == (8, 4)
    config = {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    (scaling,) = read_config(FAMILIES["gpt_oss"], config).rope_scaling
    assert scaling is not None and (scaling["rope_type"], scaling["factor"]) == ("yarn", 32.0)


# A user's file.


def of_text(text: str, folder: Path) -> Families:
    path = folder / "rules.yaml"
    path.write_text(text)
    return Families(load_rule_file(path))


MINE = """
family: mine
architecture: MineForCausalLM
like: llama
rules:
  - when: [dense]
    rules:
      - core: decoder.layers.{l}.mlp.linear_fc1.weight
        hf: model.blocks.{l}.ffn.up_and_gate.weight
        layout: same
        shape: [fc1, hidden]
  - core: decoder.layers.{l}.self_attention.core_attention.softmax_offset
    hf: ['model.layers.{l}.self_attn.sink']
    shape: [heads]
ignored: ['model\\.layers\\.\\d+\\.note']
"""


def test_a_family_of_ones_own(tmp_path):
    """Llama with fc1 in one tensor and attention sinks, both ways."""
    families = of_text(MINE, tmp_path)
    config = {**LLAMA, "model_type": "mine"}
    tensors = directory(config, families=families)
    assert tensors["model.blocks.1.ffn.up_and_gate.weight"].shape == (20, 12)
    assert not [name for name in tensors if "gate_proj" in name or "up_proj" in name]
    notes = {f"model.layers.{layer}.note": tensors["model.norm.weight"] for layer in range(2)}
    found, megatron = imported(config, {**tensors, **notes}, families=families)
    assert found.dropped == tuple(notes)
    assert "decoder.layers.1.self_attention.core_attention.softmax_offset" in megatron
    made, again = exported(megatron, found.args, config, families=families)
    assert made.config["architectures"] == ["MineForCausalLM"] and made.config["model_type"] == "mine"
    assert_same(again, tensors)


def test_a_family_like_another_replaces_and_leaves_out(tmp_path):
    text = "family: mine\nlike: llama\nfields: [rope_parameters]\nwithout: [output_layer.weight]\n"
    family = of_text(text, tmp_path)["mine"]
    assert "rope_parameters" in family.config_fields and "rope_theta" not in family.config_fields
    known_cores = {rule.core for rule in FAMILIES["llama"].rules}
    assert known_cores - {rule.core for rule in family.rules} == {"output_layer.weight"}


def test_prediction_layers_can_be_left_out(tmp_path):
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


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "linear", "factor": 2.0}, YARN, {**YARN, "rope_type": "yarn"}]
)
def test_rope_parameters_are_read_in_either_spelling_and_written_as_one(scaling, tmp_path):
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


def test_a_part_of_each_head_in_rope_parameters(tmp_path):
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
def test_another_attention_than_that_of_the_known_family(rules, tmp_path):
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


OF_QWEN = """
family: glm4_moe
architecture: Glm4MoeForCausalLM
like: qwen3_moe
"""


def test_fields_of_a_config(tmp_path):
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


LETTERS = """
family: letters
architecture: LettersForCausalLM
names: {layer: 'backbone.blocks.{l}.', mlp: feed_forward., mtp_layer: 'mtp.{m}.'}
fields:
  - dense
  - num_nextn_predict_layers: {setting: mtp_num_layers, default: 0}
    low_rank: {setting: low_rank, default: 3}
    kinds: {setting: layer_letters, wins: either}
fixed: [silu, {gate: {one_of: [soft, hard]}}]
needs: [gqa, no_bias, no_qk_norm, {num_experts: null, mtp_use_repeated_layer: {one_of: [false, true]}}]
settings: [low_rank, layer_letters]
dimensions: {rank: low_rank}
conditions: {mamba: {setting: layer_letters, is: M}, attention: {setting: layer_letters, is_not: M}}
rules:
  - ends
  - mlp
  - {core: 'decoder.layers.{l}.mixer.in.weight', hf: <layer>mixer.in.weight, shape: [rank, hidden], when: [mamba]}
  - core: decoder.layers.{l}.self_attention.linear_proj.weight
    hf: <layer>mixer.o_proj.weight
    shape: [hidden, query]
    when: [attention]
mtp: true
copies: [{core: output_layer.weight, hf: 'mtp.{n}.head.weight'}]
"""


def test_settings_sizes_and_kinds_of_layers_of_ones_own(tmp_path):
    """Both ways, and in the prediction module, whose layer is like the last."""
    family = of_text(LETTERS, tmp_path)["letters"]
    families = Families(family)
    config = {**BASE, "model_type": "letters", "kinds": ["M", "*"], "num_nextn_predict_layers": 1}
    tensors = directory(config, families=families)
    assert tensors["backbone.blocks.0.mixer.in.weight"].shape == (3, 12)
    assert {key for key in tensors if key.startswith("mtp.")} == {
        "mtp.0.post_attention_layernorm.weight", "mtp.0.feed_forward.gate_proj.weight",
        "mtp.0.feed_forward.up_proj.weight", "mtp.0.feed_forward.down_proj.weight", "mtp.0.mixer.o_proj.weight",
    }  # fmt: skip
    assert not {"backbone.blocks.0.mixer.o_proj.weight", "backbone.blocks.1.mixer.in.weight"} & tensors.keys()
    model = read_config(family, config)
    assert dict(model.own) == {"low_rank": 3, "layer_letters": ("M", "*")}
    found, megatron = imported(config, tensors, families=families)
    args = found.args
    assert args["low_rank"] == 3 and args["layer_letters"] == ["M", "*"]
    assert args["mtp_use_repeated_layer"] is False  # the first of those that are admitted
    made, again = exported(megatron, args, config, families=families)
    assert_same(again, tensors)
    assert made.config["low_rank"] == 3 and made.config["kinds"] == ("M", "*")
    with pytest.raises(MappingError, match="low_rank: the checkpoint has 3, the reference config 4"):
        export_targets(specs(megatron), args, {**config, "low_rank": 4}, families=families)
    for wrong in ({"kinds": ["M"]}, {"low_rank": -1}, {"low_rank": "wide"}):
        with pytest.raises(MappingError, match=r"1 values for 2 layers|a rule file has it for a size"):
            import_targets(specs(tensors), {**config, **wrong}, families=families)
    with pytest.raises(MappingError, match="gate is 'odd'"):
        import_targets(specs(tensors), {**config, "gate": "odd"}, families=families)


# What is written in place of what in LETTERS, what is said, and what stands on the line that is named.
WRONG = [
    ("architecture: LettersForCausalLM\n", "", "missing @ $.architecture", "family: letters"),
    ("mtp: true", "mtp: true\nmtb: true", "unknown key; did you mean mtp? @ $.mtb", "mtb"),
    ("mtp: true", "mtp: yes please", "expected bool, found 'yes please' @ $.mtp", "mtp: yes"),
    ("mtp: true", "mtp: true\nmtp: false", "'mtp' is twice in one mapping", "mtp: false"),
    ("  - mlp\n", "  - {when: [dense], rules: [mlp], core: x}\n", "unknown key @ $.rules[1].core", "core: x"),
    ("  - mlp\n", "  - {when: [dence], rules: [mlp]}\n", "'dence' is not one of the conditions; did you mean dense",
     None),
    ("  - mlp\n", "  - mlpp\n", "'mlpp' is not one of the pieces of rules; did you mean mlp or mla_up?", "- mlpp"),
    ("  - dense\n", "  - dens\n", "'dens' is not one of the pieces of fields; did you mean dense?", "- dens"),
    ("  - dense\n", "  - xyz\n", "'xyz' is not one of the pieces of fields; known are width, heads", "- xyz"),
    ("mlp: feed_forward.", "mpl: feed_forward.", "no text has <mpl> @ $.names.mpl", "names:"),
    ("<layer>mixer.in", "<leyer>mixer.in",
     "'<leyer>' is not one of the names; did you mean layer (backbone.blocks", "<leyer>"),
    ("hf: <layer>mixer.in", "hf: mixer.in", "'mixer.in.weight' has other placeholders", "mixer.in.weight"),
    ("[rank, hidden]", "[rang, hidden]", "'rang' is not one of the dimensions; did you mean rank or q_rank?", "rang"),
    ("when: [mamba]}", "when: [mamba], layout: upside}",
     "'upside' is not one of the layouts; known are same", "upside"),
    ("when: [mamba]}", "when: [mamba], layout: transpozed}",
     "did you mean transposed (columns for rows)?", "transpozed"),
    ("when: [mamba]}", "when: [mamba], layout: qkv}", "layout qkv has 3 tensors, found 1", "layout: qkv"),
    ("when: [mamba]}", "when: [mumba]}", "'mumba' is not one of the conditions; did you mean mamba?", "mumba"),
    ("when: [mamba]}", "when: [mamba], dtype: float31}", "'float31' is not one of float32", "float31"),
    ("when: [mamba]}", "when: [mamba], also: other}", "'other' has other placeholders than", "also: other"),
    ("when: [mamba]}", "when: [mamba], fused: all}", "'all' is to be 'backbone.blocks.{l}.mixer.in", "fused"),
    ("core: decoder.layers.{l}.self", "core: decoder.layers.{k}.self", "{k} in ", "{k}"),
    ("when: [attention]", "when: [mamba]\n  - {core: 'x.{l}', hf: <layer>mixer.o_proj.weight, shape: [one], "
     "when: [mamba]}", "mixer.o_proj.weight' has a rule already, $.rules[3] (line 18) @ $.rules[4]", "x.{l}"),
    ("  - mlp\n", "  - mlp\n  - gate_up\n", "'decoder.layers.{l}.mlp.linear_fc1.weight' has a rule already, pieces",
     None),
    ("{rank: low_rank}", "{rank: activation}", "'activation' is not a setting that is a size @ $.dimensions.rank",
     "dimensions"),
    ("{rank: low_rank}", "{ffn: low_rank, rank: low_rank}", "ffn is a dimension already @ $.dimensions.ffn", "{ffn"),
    ("{setting: layer_letters, is: M}", "{setting: latters, is: M}", "unknown setting 'latters'", "latters"),
    ("is_not: M", "is_not: M, is: N", "is and is_not are two conditions @ $.conditions.attention", "is: N"),
    ("{mamba:", "{dense: low_rank, mamba:", "dense is a condition already @ $.conditions.dense", "{dense:"),
    ("settings: [", "settings: [num_layers, ", "num_layers is carried for every family @ $.settings[0]", "settings:"),
    ("settings: [", "settings: [swiglu, ", "swiglu is carried for every family @ $.settings[0]", "settings:"),
    ("settings: [", "settings: [mtp_use_repeated_layer, ", "mtp_use_repeated_layer has one value", "settings:"),
    ("{num_experts: null,", "{low_rank: 3, num_experts: null,",
     "unknown setting; did you mean q_lora_rank or kv_lora_rank? @ $.needs[3].low_rank", "needs:"),
    ("no_qk_norm,", "no_qk_norm, qk_norm,", "qk_layernorm is False already @ pieces.yaml $.needs.qk_norm", None),
    ("one_of: [soft, hard]", "one_of: soft", "one_of is a list of several values @ $.fixed[1].gate", "one_of: soft"),
    ("{gate:", "{low_rank: 3, gate:", "low_rank is a field of this file, and has one value", "fixed:"),
    ("mtp_num_layers, default: 0}", "mtp_num_layers, default: 0, form: fload}",
     "'fload' is not one of the forms; did you mean float (the same number, written as a float)", "fload"),
    ("default: 3}", "default: 3, default_by: heads}", "default and default_by are two defaults", "by: heads"),
    ("default: 3}", "default_by: haeds}",
     "'haeds' is not one of the defaults; did you mean heads (as many as there are heads)?", "haeds"),
    ("wins: either}", "wins: nobody}", "'nobody' is not one of the ways to win; known are either", "nobody"),
    ("fixed:", "defaults: {hidden: 3}\nfixed:",
     "there is no field 'hidden'; did you mean hidden_size? @ $.defaults.hidden", "defaults"),
    ("  - dense\n", "  - dense\n  - rope\n", "rms_norm_eps is said already", None),
    ("  - dense\n", "  - dense\n  - hidden_size: null\n", "no field is hidden_size @ $.fields", "fields:"),
    ("  - dense\n", "  - dense\n  - hiden_size: null\n",
     "this family has no such field to leave out; did you mean hidden_size?", "hiden_size"),
    ("low_rank: {setting: low_rank", "norm: {setting: qk_layernorm, default: true}\n    low_rank: {setting: low_rank",
     "without norm in config.json it is True, and needs demands False @ pieces.yaml $.needs.no_qk_norm", None),
    ("weight, hf: 'mtp", "weight, hff: 'mtp",
     "unknown key; did you mean hf? @ $.copies[0].hff", "hff"),
    ("'mtp.{n}.head.weight'", "head.weight", "'head.weight' is to have {n}", "hf: head.weight"),
    ("[{core: output_layer.weight", "[{core: output.weight", "'output.weight' is not embedding", "output.weight"),
    ("  - ends\n", "  - head\n", "no rule is that of embedding.word_embeddings.weight @ $.rules", "rules:"),
    ("  - ends\n", "  - 3\n", "expected a mapping or the name of a piece, found 3 @ $.rules[0]", "- 3"),
    ("[{core: output_layer", "[copies, {core: output_layer",
     "'copies' is not one of the pieces of copies; known are mtp", "[copies"),
]  # fmt: skip


def test_several_values_of_a_setting_that_are_admitted(tmp_path):
    text = LETTERS.replace("gqa, no_bias", "rope, {activation: {one_of: [geglu, swiglu]}}, no_bias")
    families = of_text(text, tmp_path)
    assert families["letters"].needs["activation"] == OneOf(("geglu", "swiglu"))
    config = {**BASE, "model_type": "letters", "kinds": ["*", "*"]}
    found, megatron = imported(config, directory(config, families=families), families=families)
    assert found.args["activation_func"] == "megatron.core.activations.fast_gelu"
    silu = {**found.args, "gated_linear_unit": True, "activation_func": "torch.nn.functional.silu"}
    assert export_targets(specs(megatron), silu, config, families=families).tensors
    quick = {**silu, "activation_func": "quick_gelu"}
    text = problems(lambda: export_targets(specs(megatron), quick, config, families=families))
    assert "activation is 'quick_geglu'; LettersForCausalLM is one of 'geglu', 'swiglu'" in text


def test_what_a_form_reads_with_its_field_is_named(tmp_path):
    form = "low_rank: {setting: moe_shared_expert_intermediate_size, form: shared_experts}"
    text = LETTERS.replace("low_rank: {setting: low_rank, default: 3}", form)
    family = of_text(text.replace("rank: low_rank", "rank: kv_lora_rank"), tmp_path)["letters"]
    config = {**BASE, "model_type": "letters", "kinds": ["*", "*"], "low_rank": 1}
    text = problems(lambda: read_config(family, config))
    assert "low_rank is read together with moe_intermediate_size, which is missing" in text


def refused(text: str, folder: Path) -> list[str]:
    """What is wrong with a rule file, line by line."""
    with pytest.raises(UsageError) as caught:
        of_text(text, folder)
    return [str(caught.value), *caught.value.problems]


@pytest.mark.parametrize(("old", "new", "said", "line"), WRONG, ids=[one[2][:40] for one in WRONG])
def test_a_contradiction_is_an_error_with_its_line(old, new, said, line, tmp_path):
    assert old in LETTERS
    text = LETTERS.lstrip("\n").replace(old, new, 1)
    found = [one for one in refused(text, tmp_path)[1:] if said in one]
    number = int(found[0].rpartition("(line ")[2].removesuffix(")"))
    if line is not None:
        assert line in text.splitlines()[number - 1], found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "expected a mapping @ $"), ("family: [", "while parsing"), ("like: llama", "missing @ $.family"),
        ("family: x\nlike: lama", "'lama' is not one of the families; did you mean llama"),
        ("family: 3", "expected str, found 3 @ $.family"),
        ("family: x\nneeds: {swigloo: true}", "unknown setting @ $.needs.swigloo"),
        ("family: x\nneeds: {lr: 1}", "unknown setting @ $.needs.lr"),
        ("family: x\nfields: {a: 3}", "expected a setting, a mapping or null, found 3 @ $.fields.a"),
        ("family: x\nfields: {a: {setting: swigloo}}", "unknown setting 'swigloo' @ $.fields.a"),
        ("family: x\nfields: {a: {setting: kv_channels, colour: 1}}", "unknown key @ $.fields.a.colour"),
        ("family: x\nfields: {a: moe_layers}", "known are decoder_sparse_step, first_k_dense_replace"),
        ("family: x\nignored: ['(']", "not a regular expression @ $.ignored[0]"),
        ("family: x\nwithout: [nothing]", "no rule for 'nothing' to leave out @ $.without[0]"),
        ("family: x\nrules: [{core: a, hf: b}]", "expected a text or a list of texts, found None @ $.rules[0].shape"),
        # YAML takes them for texts
        ("family: x\ndefaults: {rope_theta: 1.0e6}", "write 1.0e+6 @ $.defaults.rope_theta (line 2)"),
        ("family: x\nfixed: [{clip: 1e-5}]", "write 1.0e-5 @ $.fixed[0].clip (line 2)"),
        ("family: x\nfixed: {scale: {one_of: [1.0, -2.5E3]}}", "write -2.5e+3 @ $.fixed.scale.one_of[1] (line 2)"),
        ("family: x\nneeds: {rotary_base: 1e4}", "write 1.0e+4 @ $.needs.rotary_base (line 2)"),
        ("family: x\nfields: {rope_theta: {setting: rotary_base, default: 1e6}}",
         "write 1.0e+6 @ $.fields.rope_theta.default (line 2)"),
    ],
)  # fmt: skip
def test_errors_name_their_place(text, problem, tmp_path):
    assert problem in refused(text, tmp_path)[0]


def test_the_pieces_of_the_package_have_lines_too(tmp_path):
    text = LETTERS.replace("mlp: feed_forward.", "layer: blocks., mlp: feed_forward.").replace(
        "layer: 'backbone.blocks.{l}.', ", ""
    )
    lines, found = (FOLDER.parent / "pieces.yaml").read_text().splitlines(), refused(text, tmp_path)[1:]
    for one in found:
        if "pieces.yaml" in one:
            line = lines[int(one.rpartition("(line ")[2].rstrip(")")) - 1]
            assert line.strip().startswith(("hf:", "fused:")), one
    assert any("pieces.yaml $.rules.dense_norm[0].hf[0] (line " in one for one in found)


DOWN = "core: 'decoder.layers.{l}.mlp.linear_fc2.weight', hf: <layer>mlp.down_proj.weight, shape: [hidden, hidden]"
NORM = "core: decoder.final_layernorm.weight, hf: model.norm.weight, shape: [hidden]"
OF_QKV = (
    "core: 'decoder.layers.{l}.self_attention.linear_qkv.weight', layout: qkv, hf: "
    "[<layer>self_attn.q_proj.weight, <layer>self_attn.k_proj.weight, <layer>self_attn.v_proj.weight], shape: "
)
PLACE = ", $.rules[0] (line 5) of the rule file"


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (DOWN, f"config.json asks by hidden x hidden{PLACE}, for [12"),
        (f"{OF_QKV}[hidden, hidden]", f"layout qkv does not fit [12, 12] (hidden x hidden){PLACE}"),
        (f"{OF_QKV}[qkv_gate, hidden]", f"layout qkv does not fit [48, 12] (qkv_gate x hidden){PLACE}"),
        (f"{NORM}, layout: transposed", f"layout transposed does not fit [12] (hidden){PLACE}"),
        (f"{NORM}, layout: halves_swapped", f"layout halves_swapped does not fit [12] (hidden){PLACE}"),
    ],
)
def test_sizes_that_do_not_fit_name_the_rule(rule, problem, tmp_path):
    families = of_text(f"family: mine\nlike: llama\narchitecture: Mine\nrules:\n  - {{{rule}}}\n", tmp_path)
    tensors, config = directory(LLAMA), {**LLAMA, "model_type": "mine"}
    assert problem in problems(lambda: imported(config, tensors, families=families))
    found, megatron = imported(LLAMA, tensors)
    text = problems(lambda: exported(megatron, found.args, config, families=families))
    assert problem.replace("config.json asks", "its settings ask") in text


@pytest.mark.parametrize(
    ("settings", "config", "lines"),
    [
        ({"use_mup": True}, {}, ["`needs: {use_mup: true}`", "`fixed: {NAME: VALUE}`"]),
        ({}, {"use_qk_norm": True}, ["`needs: {NAME: VALUE}`", "`fixed: {use_qk_norm: true}`"]),
        ({"use_mup": True, "no_rope_freq": [0, 1]}, {"use_qk_norm": True},  # a list is said in the problem's own line
         ["no_rope_freq is [0, 1]", "`needs: {use_mup: true}`", "`fixed: {use_qk_norm: true}`"]),
    ],
)  # fmt: skip
def test_a_refusal_names_the_line_to_add(settings, config, lines):
    found, megatron = imported(LLAMA, directory(LLAMA))
    text = problems(lambda: export_targets(specs(megatron), {**found.args, **settings}, LLAMA | config))
    assert all(line in text for line in lines)
