"""The ledgers: every argument and every config field has one class, and its class decides what becomes of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.huggingface.config import ledger as module
from ckpt_tools.megatron.huggingface.config.ledger import arguments, config_fields_of
from ckpt_tools.megatron.huggingface.config.megatron_args import flat_args, read_model_args
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, load_rule_file
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.targets import Exported, export_targets, import_targets
from tests.conftest import DATA, all_checkpoints
from tests.megatron.huggingface.by_rules import DEEPSEEK, LLAMA, QWEN3_MOE, directory, imported, problems
from tests.megatron.huggingface.materialise import specs

PACKAGE = Path(module.__file__).parent
CHECKPOINTS = sorted(path.parent for run in all_checkpoints().values() for path in run.rglob(".metadata"))
# A value for each setting that changes the forward pass, where `True` is not one.
OTHERS = {"no_rope_freq": [0, 1], "experimental_attention_variant": "dsa",
          "moe_router_load_balancing_type": "sinkhorn", "spec": ["my.specs", "layer"],
          "transformer_layer_spec": {"_target_": "my.spec", "_call_": False},
          "heterogeneous_layers_config_path": "layers.json", "embedding_multiplier": 12.0,
          "heterogeneous_layers_config_encoded_json": "{}"}  # fmt: skip
SWITCHED_ON = {"num_experts": 3, "mtp_num_layers": 0, "use_grouped_gemm_for_shared_expert": True,
               "experimental_attention_variant": "dsa"}  # fmt: skip


def recorded(file: str) -> dict[str, list[str]]:
    """Names by their heading, of a file in tests/data."""
    found: dict[str, list[str]] = {}
    for line in (DATA / file).read_text().splitlines():
        if line.startswith("  "):
            found[next(reversed(found))] += line.split()
        elif line.endswith(":"):
            found[line[:-1]] = []
    return found


@cache
def source(config: str) -> tuple[dict[str, Spec], Mapping[str, Any]]:
    """Parameters and args of a model by its config.json."""
    found, megatron = imported(json.loads(config), directory(json.loads(config)))
    return specs(megatron), found.args


def export(config: dict[str, Any], **args: Any) -> Exported:
    parameters, found = source(json.dumps(config))
    return export_targets(parameters, {**found, **args})


def test_every_argument_of_every_release_has_a_class() -> None:
    known = arguments()
    releases = recorded("megatron_arguments.txt")
    assert len(releases) == 14 and sum(map(len, releases.values())) > 1100
    assert [name for found in releases.values() for name in found if name not in known] == []


def test_a_name_has_one_class() -> None:
    data = yaml.safe_load((PACKAGE / "arguments.yaml").read_text())
    assert data.keys() == {"carried", "changes", "shape", "only_with", "irrelevant"}
    count = Counter([*data["carried"], *data["changes"]])
    for part in ("shape", "only_with", "irrelevant"):
        count.update(name for text in data[part].values() for name in text.split())
    assert [name for name, times in count.items() if times > 1] == []
    fields = yaml.safe_load((PACKAGE / "config_json.yaml").read_text())
    assert fields["families"].keys() <= FAMILIES.keys()
    for own in [{}, *fields["families"].values()]:
        count = Counter([*fields["changes"], *own.get("changes", {})])
        for part in (fields["shape"], fields["irrelevant"], own.get("irrelevant", {})):
            count.update(name for text in part.values() for name in text.split())
        assert [name for name, times in count.items() if times > 1] == []


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_real_checkpoint_brings_no_argument_without_a_class(path: Path) -> None:
    with open_checkpoint(str(path)) as opened:
        args = flat_args(opened.common.args or opened.common.model_config or {})
    assert [name for name in args if name not in arguments()] == []


class Recording(dict[str, Any]):
    """Settings that note which of them are looked at."""

    seen: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


def test_what_is_carried_is_read() -> None:
    llama, moe, mla = (imported(c, directory(c))[0].args for c in (LLAMA, QWEN3_MOE, DEEPSEEK))
    yarn, bridge = {"position_embedding_type": "yarn"}, {"gated_linear_unit": True}
    bare = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 4}
    variants: list[Mapping[str, Any]] = [
        bare, {**bare, "num_experts": 2, "moe_router_num_groups": 2}, llama,
        {**moe, "moe_mlp_glu_interleave_size": 2},
        {**mla, "rotary_scaling_factor": 2.0, "rope_type": "yarn"},
        {**mla, "experimental_attention_variant": "dsa"},
        {**llama, **yarn}, {**llama, **bridge, "share_embeddings_and_output_weights": True},
        {**llama, "use_rope_scaling": True, "bf16": False, "params_dtype": "torch.float16"},
        {**llama, "rotary_base": [1, 2], "rope_scaling_factor": 2, "window_size": (3, 0), "num_query_groups": 2},
        {**bare, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2},
        {**bare, "hybrid_override_pattern": "M-"},
    ]  # fmt: skip
    seen: set[str] = set()
    for variant in variants:
        settings = Recording(variant)
        settings.seen = seen
        read_model_args(settings)
    assert arguments().carried.keys() - seen == set()


@pytest.mark.parametrize("name", arguments().changes)
def test_what_changes_the_forward_pass_is_refused_by_name(name: str) -> None:
    change = arguments().changes[name]
    other = OTHERS.get(name, 12.0 if 1 in change.neutral or not change.neutral else True)
    switched = {one: SWITCHED_ON[one] for one in change.only_with if one in SWITCHED_ON}
    if name.startswith("mtp_"):
        switched["mtp_num_layers"] = 1
    text = problems(lambda: export(QWEN3_MOE, **switched, **{name: other}))
    assert f"- {name} is " in text and change.why in text and "--rules" in text


@pytest.mark.parametrize("name", arguments().changes)
def test_neutral_values_pass_without_a_word(name: str) -> None:
    plain = export(QWEN3_MOE)
    spelled = {"megatron.*": {"_target_": "megatron.bridge.models.spec"},
               "megatron.core.models.*": ["megatron.core.models.hybrid.specs", "stack"]}  # fmt: skip
    for neutral in (*arguments().changes[name].neutral, None):
        value = spelled.get(str(neutral), neutral)
        assert export(QWEN3_MOE, **{name: value}) == plain, value


@pytest.mark.parametrize(
    "args",
    [
        {"moe_apply_probs_on_input": True},  # no experts
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"mtp_use_repeated_layer": True},
        {"mup_embedding_mult": 4.0, "mup_output_mult": 0.25},  # without use_mup
        {"moe_shared_expert_glu_interleave_size": 32},
        {"no_rope_freq": [0, 0]},
        {"no_rope_freq": (0, 0)},
        {"transformer_layer_spec": {"_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
                                    "_partial_": True, "_args_": [True]}},
        {"rope_scaling_factor": 32.0},  # without use_rope_scaling
        {"window_attn_skip_freq": 2},  # without a window
        {"softmax_scale": 0.5},  # 1 / sqrt(4), the size of a head
        {"moe_router_num_groups": 1, "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 1.0},
        {"add_qkv_bias": False, "activation_func_clamp_value": None, "glu_linear_offset": 0.0},
        {"tensor_model_parallel_size": 8, "lr": 3e-4, "fp8": "hybrid", "apply_query_key_layer_scaling": True},
    ],
)  # fmt: skip
def test_what_has_no_effect_passes(args: dict[str, Any]) -> None:
    assert export(LLAMA, **args) == export(LLAMA)


def test_several_kinds_of_balancing_are_neutral_together() -> None:
    assert export(QWEN3_MOE, moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"]) == export(QWEN3_MOE)
    text = problems(lambda: export(QWEN3_MOE, moe_router_load_balancing_type=["aux_loss", "sinkhorn"]))
    assert "moe_router_load_balancing_type is ['aux_loss', 'sinkhorn']" in text


@pytest.mark.parametrize(
    ("config", "args", "said"),
    [
        (LLAMA, {"glu_linear_offset": 1.0}, "glu_linear_offset is 1.0"),
        (LLAMA, {"activation_func_clamp_value": 7.0}, "activation_func_clamp_value is 7.0"),
        (LLAMA, {"softmax_scale": 0.25}, "softmax_scale, as 1 / its square, is 16.0"),
        (LLAMA, {"rotary_base": [10000, 1000000]}, "the local rotary_base is 10000"),
        (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (LLAMA, {"add_qkv_bias": True}, "add_qkv_bias is True"),
        (LLAMA, {"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        (
            LLAMA,
            {"swiglu": False, "gated_linear_unit": True, "activation_func": "relu"},
            "activation is 'gated relu'",
        ),
    ],
)
def test_settings_that_a_family_does_not_have_are_refused(
    config: dict[str, Any], args: Any, said: str
) -> None:
    assert f"- {said}" in problems(lambda: export(config, **args))


def test_the_weight_of_a_single_expert_is_not_normalized() -> None:
    """Megatron keeps its sigmoid; transformers would make it 1 by norm_topk_prob."""
    assert export(DEEPSEEK).config["norm_topk_prob"] is True
    single = {**DEEPSEEK, "num_experts_per_tok": 1, "norm_topk_prob": False}
    assert export(single).config["norm_topk_prob"] is False
    for wrong in ({**DEEPSEEK, "norm_topk_prob": False}, {**single, "norm_topk_prob": True}):
        assert "norm_topk_prob: Megatron computes as with" in problems(
            lambda c=wrong: imported(c, directory(single))
        )


@pytest.mark.parametrize(
    "args",
    [{"softmax_scale": "x"}, {"softmax_scale": 0}, {"moe_mlp_glu_interleave_size": "x"}, {"rotary_base": "x"},
     {"rotary_base": [1, 2, 3]}, {"query_pre_attn_scalar": -1}, {"interleaved_attn_pattern": [5, 2]},
     {"activation_func": {"_args_": 5}, "gated_linear_unit": True}, {"no_rope_freq": np.arange(2)},
     {"spec": object()}],
)  # fmt: skip
def test_values_that_are_not_what_they_must_be(args: dict[str, Any]) -> None:
    assert next(iter(args)).split("_")[0] in problems(lambda: export(QWEN3_MOE, **args))


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "no_rope_freq is [[...]]" in problems(lambda: export(LLAMA, no_rope_freq=loop))


def test_biases_everywhere_include_those_of_queries_keys_and_values() -> None:
    """Megatron-LM sets add_qkv_bias with add_bias_linear."""
    config = {**LLAMA, "attention_bias": True, "mlp_bias": True}
    assert export(config, add_qkv_bias=True).config["attention_bias"] is True


def test_unknown_arguments_are_named_when_they_are_set() -> None:
    unset = dict.fromkeys("abcde") | {"f": False, "g": "", "h": [], "i": {}}
    assert export(LLAMA, **unset) == export(LLAMA)
    notes = export(LLAMA, my_scale=2.5, my_path="x" * 100).notes
    (note,) = set(notes) - set(export(LLAMA).notes)
    assert note.startswith("not known to this version") and "my_scale=2.5" in note and len(note) < 200
    hostile = export(LLAMA, **{"::error::x\n": 1}).notes  # a name cannot begin a line of its own
    assert all("\n" not in note for note in hostile) and any("'::error::x\\n'=1" in note for note in hostile)
    many = export(LLAMA, **{f"mine_{i:02}": i for i in range(1, 31)}).notes
    assert any("mine_20=20 and 10 more" in one for one in many)


def test_a_rule_file_does_not_bypass_the_ledger(tmp_path: Path) -> None:
    """Unless it says that its architecture computes the value; then no other one is taken."""
    config = {**LLAMA, "model_type": "mine"}

    def family(more: str) -> Any:
        (tmp_path / "mine.yaml").write_text("family: mine\nlike: llama\n" + more)
        return {**FAMILIES, "mine": load_rule_file(tmp_path / "mine.yaml")}

    found, megatron = imported(LLAMA, directory(LLAMA))
    args = {**found.args, "no_rope_freq": [0, 1]}
    text = problems(lambda: export_targets(specs(megatron), args, config, families=family("")))
    assert "no_rope_freq is [0, 1]" in text
    demanding = family("needs: {no_rope_freq: [0, 1]}\nfixed: {no_rope_layers: [1, 0]}")
    assert import_targets(specs(directory(LLAMA)), config, families=demanding).args["no_rope_freq"] == [0, 1]
    exported = export_targets(specs(megatron), args, config, families=demanding)
    assert exported.config["no_rope_layers"] == [1, 0]
    for other in (None, [1, 0]):
        text = problems(
            lambda v=other: export_targets(
                specs(megatron), {**args, "no_rope_freq": v}, config, families=demanding
            )
        )
        assert f"no_rope_freq is {other}; mine demands [0, 1]" in text
    text = problems(
        lambda: import_targets(
            specs(directory(LLAMA)), {**config, "embedding_multiplier": 12}, families=family("")
        )
    )
    assert "embedding_multiplier is 12" in text
    with pytest.raises(UsageError, match=r"unknown setting @ \$\.needs\.lr"):
        family("needs: {lr: 1}")


def test_every_field_of_every_configuration_class_has_a_class() -> None:
    fields = recorded("config_json_fields.txt")
    assert fields.keys() == {"any", *FAMILIES}
    for name, family in FAMILIES.items():
        carried = {hf for one in family.fields for hf in (one.hf, one.also)} | set(family.fixed)
        ledger = config_fields_of(name)
        assert [
            one for one in fields["any"] + fields[name] if one not in ledger and one not in carried
        ] == [], name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("name", config_fields_of("llama").changes)
def test_config_fields_that_change_the_forward_pass_are_refused(family: str, name: str) -> None:
    """On import, and as a reference of an export; neutral values are not."""
    config = {"llama": LLAMA, "qwen3_moe": QWEN3_MOE}[family]
    parameters, args = source(json.dumps(config))
    tensors = specs(directory(config))
    change = config_fields_of(family).changes[name]
    for value in change.neutral:
        assert import_targets(tensors, {**config, name: value}).notes == import_targets(tensors, config).notes
    wrong = {**config, name: 0.5 if 1 in change.neutral or not change.neutral else {"0": [1]}}
    for call in (
        lambda: import_targets(tensors, wrong),
        lambda: export_targets(parameters, args, wrong),
    ):
        text = problems(call)
        assert f"- {name} is " in text and change.why in text


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights is False"),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True",
        ),
        ({**DEEPSEEK, "rope_interleave": False}, "rope_interleave is False"),
        (
            {**LLAMA, "model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is",
        ),
    ],
)
def test_fields_of_one_family(config: dict[str, Any], said: str) -> None:
    gpt2 = {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 9, "vocab_size": 11}
    config = {**gpt2, **config} if config["model_type"] == "gpt2" else config
    plain = {key: value for key, value in config.items() if key not in said}
    assert f"- {said}" in problems(lambda: import_targets(specs(directory(plain)), config))


@pytest.mark.parametrize("kinds", ["full_attention", 5, ["full_attention"], ["full_attention"] * 3, [1, 2]])
def test_kinds_of_layers_that_are_not_a_list_of_all(kinds: Any) -> None:
    qwen3 = {**LLAMA, "model_type": "qwen3"}
    text = problems(lambda: import_targets(specs(directory(qwen3)), {**qwen3, "layer_types": kinds}))
    assert "- layer_types is" in text


def test_kinds_of_layers_that_the_class_has_anyway_are_neutral() -> None:
    qwen3 = {**LLAMA, "model_type": "qwen3"}
    assert (
        import_targets(specs(directory(qwen3)), {**qwen3, "layer_types": ["full_attention"] * 2}).notes == ()
    )


def test_two_names_of_one_field_may_not_differ() -> None:
    tensors = specs(directory(QWEN3_MOE))
    assert import_targets(tensors, {**QWEN3_MOE, "num_local_experts": 3}).notes == ()
    text = problems(lambda: import_targets(tensors, {**QWEN3_MOE, "num_local_experts": 4}))
    assert "num_experts is 3 and num_local_experts 4: two names of one setting" in text


def test_a_checkpoint_without_args_says_so() -> None:
    parameters, _ = source(json.dumps(LLAMA))
    assert any("holds no args" in note for note in export_targets(parameters, None, LLAMA).notes)
    text = problems(lambda: export_targets(parameters, None, {**LLAMA, "embedding_multiplier": 12}))
    assert "embedding_multiplier is 12" in text


GPT2 = {"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 9, "vocab_size": 11}


@pytest.mark.parametrize(
    ("name", "fused", "written"),
    [("gelu_new", True, "gelu_new"), ("gelu_pytorch_tanh", True, "gelu_new"), ("gelu", False, "gelu")],
)
def test_the_gelu_that_is_computed(name: str, fused: bool, written: str) -> None:
    """Megatron's fused GELU is the approximation by tanh, its plain one is not."""
    config = {**GPT2, "activation_function": name}
    _, args = source(json.dumps(config))
    assert args["bias_gelu_fusion"] is fused
    assert export(config).config["activation_function"] == written
    assert export(config, bias_gelu_fusion=not fused).config["activation_function"] != written
    assert export(config, use_te_activation_func=True).config["activation_function"] == "gelu_new"
    assert "'relu' is not one of" in problems(
        lambda: import_targets(specs(directory(GPT2)), {**GPT2, "activation_function": "relu"})
    )


def test_gpt2_has_as_many_keys_as_queries() -> None:
    parameters, args = source(json.dumps(GPT2))
    shared = {**args, "group_query_attention": True, "num_query_groups": 1}
    assert "num_query_groups is 1" in problems(lambda: export_targets(parameters, shared, GPT2))
    assert "settings ask for [20, 12]" in problems(
        lambda: export_targets(parameters, shared)
    )  # as GPT-BigCode


@pytest.mark.parametrize(
    ("mscale", "all_dim", "factor"), [(1.0, 0.0, None), (None, None, None), (1.0, 1.0, 1.0), (0.0, 0.0, 1.0)]
)
def test_the_attention_factor_of_yarn(
    mscale: float | None, all_dim: float | None, factor: float | None
) -> None:
    """transformers takes 0.1 ln(factor) + 1 unless told; Megatron a quotient of two such terms."""
    yarn = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": mscale}
    scaling = export(LLAMA, **yarn, mscale_all_dim=all_dim, use_rotary_position_embeddings=False).config[
        "rope_scaling"
    ]
    assert scaling["rope_type"] == "yarn" and scaling.get("attention_factor") == factor


def test_gemma3_there_and_back_without_a_reference() -> None:
    """What Megatron-LM has no names for is kept under Bridge's."""
    gemma = {**LLAMA, "model_type": "gemma3_text", "tie_word_embeddings": True, "rope_local_base_freq": 10000.0,
             "rope_theta": 1e6, "sliding_window": 8, "query_pre_attn_scalar": 6,
             "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    config = export(gemma).config
    assert {key: config[key] for key in gemma} == gemma and config["sliding_window_pattern"] == 6


def test_unknown_config_fields_are_named_when_they_are_set() -> None:
    tensors = specs(directory(LLAMA))
    assert import_targets(tensors, {**LLAMA, "one": None, "two": False}).notes == ()
    (note,) = import_targets(tensors, {**LLAMA, "my_scale": 2.5}).notes
    assert "not known to this version" in note and "my_scale=2.5" in note
