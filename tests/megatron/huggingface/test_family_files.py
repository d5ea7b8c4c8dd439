"""Whole families in files: those that are known, one of a user's own, and contradictions with their lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file, save_file

from ckpt_tools.cli.app import run
from ckpt_tools.errors import CkptError, MappingError, UsageError
from ckpt_tools.megatron.huggingface.config.codecs import DEFAULTS, FORMS
from ckpt_tools.megatron.huggingface.config.config import read_config
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
from tests.megatron.huggingface.by_rules import BASE, DEEPSEEK, assert_same, directory, exported, imported
from tests.megatron.huggingface.family_table import GIVEN, INSIDE, PAGE, classes, page
from tests.megatron.huggingface.materialise import specs
from tests.megatron.huggingface.models import CONFIGS, NOT_IN_MEGATRON, family_of, installed
from tests.megatron.huggingface.released import RELEASED
from tests.megatron.huggingface.vision_language import KINDS
from tests.peers.test_vision_language import CASES as BRIDGE

EXAMPLE = REPO / "example-scripts" / "huggingface_family.yaml"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_known_family_is_a_file_as_a_user_may_write_it(name: str) -> None:
    family = load_rule_file(FOLDER / f"{name}.yaml")
    assert family == FAMILIES[name]
    assert not family.like and len(family.rules) > 5 and len(family.fields) > 8


def test_only_the_file_that_a_config_names_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_file_of_another_name_than_its_family_is_a_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


OF_RULE_FILES = {"rope_parameters", "partial_rope_parameters"}


@pytest.mark.parametrize("kind", ["rules", "fields", "needs", "fixed", "copies"])
def test_every_piece_is_used(kind: str) -> None:
    """By a family, or by another piece; but for those that only rule files name."""
    used = {part for part in parts(kind) if isinstance(part, str)}
    assert pieces().data[kind].keys() - OF_RULE_FILES == used


def test_the_page_of_rule_files_is_what_the_tables_make() -> None:
    """Otherwise: `python -m tests.megatron.huggingface.rule_page`. No form, default or layout is without a word."""
    assert rule_page.PAGE.read_text() == rule_page.page()
    made = (*DEFAULTS.values(), *JOINED.values(), *(one for _, one in LAYOUTS.values()))
    assert all([*(one.says for one in FORMS.values()), *map(first_line, made)])


def test_every_name_of_pieces_is_in_a_rule() -> None:
    whole = (FOLDER.parent / "pieces.yaml").read_text()
    assert [name for name in pieces().data["names"] if f"<{name}>" not in whole] == []


def test_no_rule_stands_twice() -> None:
    """Families that share one name a piece."""
    rules = [json.dumps(part, sort_keys=True) for part in parts("rules") if isinstance(part, dict)]
    assert [rule for rule in set(rules) if rules.count(rule) > 1] == []


def test_the_example_converts_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def letters(tmp_path: Path, text: str = LETTERS) -> Family:
    path = tmp_path / "letters.yaml"
    path.write_text(text)
    return load_rule_file(path)


def test_settings_sizes_and_kinds_of_layers_of_ones_own(tmp_path: Path) -> None:
    """Both ways, and in the prediction module, whose layer is like the last."""
    family = letters(tmp_path)
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


def test_several_values_of_a_setting_that_are_admitted(tmp_path: Path) -> None:
    text = LETTERS.replace("gqa, no_bias", "rope, {activation: {one_of: [geglu, swiglu]}}, no_bias")
    family = letters(tmp_path, text)
    assert family.needs["activation"] == OneOf(("geglu", "swiglu"))
    config = {**BASE, "model_type": "letters", "kinds": ["*", "*"]}
    tensors = directory(config, families=Families(family))
    found, megatron = imported(config, tensors, families=Families(family))
    args = found.args
    assert args["activation_func"] == "megatron.core.activations.fast_gelu"
    silu = {**args, "gated_linear_unit": True, "activation_func": "torch.nn.functional.silu"}
    assert export_targets(specs(megatron), silu, config, families=Families(family)).tensors
    quick = {**silu, "activation_func": "quick_gelu"}
    with pytest.raises(MappingError, match=r"activation is 'quick_geglu'; .* is one of 'geglu', 'swiglu'"):
        export_targets(specs(megatron), quick, config, families=Families(family))


def test_what_a_form_reads_beside_its_field_is_named(tmp_path: Path) -> None:
    form = "low_rank: {setting: moe_shared_expert_intermediate_size, form: shared_experts}"
    text = LETTERS.replace("low_rank: {setting: low_rank, default: 3}", form)
    family = letters(tmp_path, text.replace("rank: low_rank", "rank: kv_lora_rank"))
    with pytest.raises(
        MappingError, match="low_rank is read together with moe_intermediate_size, which is miss"
    ):
        read_config(family, {**BASE, "model_type": "letters", "kinds": ["*", "*"], "low_rank": 1})


# What is written in place of what in LETTERS, what is said, and what stands on the line that is named.
WRONG = [
    ("architecture: LettersForCausalLM\n", "", "missing @ $.architecture", "family: letters"),
    ("mtp: true", "mtp: true\nmtb: true", "unknown key; did you mean mtp? @ $.mtb", "mtb"),
    ("mtp: true", "mtp: yes please", "expected bool, found 'yes please' @ $.mtp", "mtp: yes"),
    ("mtp: true", "mtp: true\nmtp: false", "'mtp' stands twice in one mapping", "mtp: false"),
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
    ("no_qk_norm,", "no_qk_norm, qk_norm,", "qk_layernorm is False already @ pieces.yaml $.needs.qk_norm[0]", None),
    ("one_of: [soft, hard]", "one_of: soft", "one_of is a list of several values @ $.fixed[1].gate", "one_of: soft"),
    ("{gate:", "{low_rank: 3, gate:", "low_rank is a field of its own, and has one value: one of both", "fixed:"),
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
     "without norm in config.json it is True, and needs demands False @ pieces.yaml $.needs.no_qk_norm[0]", None),
    ("weight, hf: 'mtp", "weight, hff: 'mtp",
     "unknown key; did you mean hf? @ $.copies[0].hff", "hff"),
    ("'mtp.{n}.head.weight'", "head.weight", "'head.weight' is to have {n}", "hf: head.weight"),
    ("[{core: output_layer.weight", "[{core: output.weight", "'output.weight' is not embedding", "output.weight"),
    ("  - ends\n", "  - head\n", "no rule is that of embedding.word_embeddings.weight @ $.rules", "rules:"),
    ("  - ends\n", "  - 3\n", "expected a mapping @ $.rules[0]", "- 3"),
    ("[{core: output_layer", "[copies, {core: output_layer",
     "'copies' is not one of the pieces of copies; known are mtp", "[copies"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said", "line"), WRONG, ids=[one[2][:40] for one in WRONG])
def test_a_contradiction_is_an_error_with_its_line(
    old: str, new: str, said: str, line: str | None, tmp_path: Path
) -> None:
    assert old in LETTERS
    text = LETTERS.lstrip("\n").replace(old, new, 1)
    with pytest.raises(UsageError) as caught:
        letters(tmp_path, text)
    found = [one for one in caught.value.problems if said in one]
    assert found, caught.value.problems
    number = int(found[0].rpartition("(line ")[2].removesuffix(")"))
    if line is not None:
        assert line in text.splitlines()[number - 1], found


def test_the_pieces_of_the_package_have_lines_too(tmp_path: Path) -> None:
    text = LETTERS.replace("mlp: feed_forward.", "layer: blocks., mlp: feed_forward.").replace(
        "layer: 'backbone.blocks.{l}.', ", ""
    )
    with pytest.raises(UsageError) as caught:
        letters(tmp_path, text)
    lines = (FOLDER.parent / "pieces.yaml").read_text().splitlines()
    for one in caught.value.problems:
        if "pieces.yaml" in one:
            line = lines[int(one.rpartition("(line ")[2].rstrip(")")) - 1]
            assert line.strip().startswith(("hf:", "fused:")), one
    assert any("pieces.yaml $.rules.dense_norm[0].hf[0] (line " in one for one in caught.value.problems)


def test_what_a_class_takes_without_a_field_counts_for_the_fields_beside_it() -> None:
    """DeepSeek-V3 without n_group has groups of experts; GPT-OSS without rope_scaling has YaRN."""
    model = read_config(FAMILIES["deepseek_v3"], DEEPSEEK)
    assert (model.moe_router_num_groups, model.moe_router_group_topk) == (8, 4)
    one = read_config(FAMILIES["deepseek_v3"], {**DEEPSEEK, "n_group": 1})
    assert (one.moe_router_num_groups, one.moe_router_group_topk) == (None, None)
    oss = {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    (scaling,) = read_config(FAMILIES["gpt_oss"], oss).rope_scaling
    assert scaling is not None and (scaling["rope_type"], scaling["factor"]) == ("yarn", 32.0)
    plain = {**oss, "rope_scaling": {"rope_type": "default"}}
    assert read_config(FAMILIES["gpt_oss"], plain).rope_scaling == (None,)


def test_the_page_is_what_the_lists_make() -> None:
    """Otherwise: `python -m tests.megatron.huggingface.family_table`."""
    assert PAGE.read_text() == page()


def test_every_vision_language_model_is_tested_both_ways() -> None:
    ruled = {name for name in vision_language_types() if vision_language(name).rules}
    assert ruled == KINDS.keys() and BRIDGE.keys() <= ruled


def test_every_family_is_tested_both_ways() -> None:
    """As a tiny model of transformers, or by its rules alone."""
    tiny = {family_of(variant) for variant in CONFIGS}
    released = {family_of_config(config).name for config in RELEASED.values()}
    assert tiny | released | INSIDE.keys() == FAMILIES.keys()
    assert GIVEN.keys() <= tiny and CONFIGS.keys() >= set(NOT_IN_MEGATRON)
    known = {kind for names in classes().values() for kind in names}
    assert known == {kind for kind, _ in CONFIGS.values()}


def test_the_classes_of_a_release_are_those_that_are_recorded() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="the optional peer transformers is not installed"
    )
    assert classes()[transformers.__version__] == {kind for kind, _ in installed().values()}
