"""Groups by attributes, and what a user's map may change."""

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.fsdp_dtensor.parameters import LiveParameter, Rows
from ckpt_tools.megatron.keys import strip_wrappers
from ckpt_tools.megatron.param_groups import (
    GroupRules,
    Membership,
    derive_memberships,
    merge_map,
)
from ckpt_tools.megatron.run_state.stored_values import optimizer_groups
from ckpt_tools.model.model import Parameter

DECAY = {"wd_mult": 1.0, "is_expert_parallel": False, "lr": 0.1}
NO_DECAY = {"wd_mult": 0.0, "is_expert_parallel": False, "lr": 0.1}
EXPERT = {"wd_mult": 1.0, "is_expert_parallel": True, "lr": 0.1}


def parameter(name, *shape, expert=None):
    stored = Parameter(name, shape, "bfloat16", {}, expert)
    return LiveParameter(name, name, shape, (Rows(stored, 0, shape[0]),))


PARAMETERS = [
    parameter("a.weight", 4, 4),
    parameter("a.layer_norm_weight", 4),
    parameter("a.bias", 4, 1),
    parameter("e.weight0", 4, 4, expert=0),
]


def groups_of(derived):
    return {name: m.group for name, m in derived.items()}


def test_weight_decay_and_experts():
    derived = derive_memberships(PARAMETERS, [DECAY, NO_DECAY, EXPERT], GroupRules(experts_apart=True))
    assert groups_of(derived) == {"a.weight": 0, "a.layer_norm_weight": 1, "a.bias": 1, "e.weight0": 2}
    assert "routed expert" in derived["e.weight0"].rule


def test_experts_join_the_dense_groups_when_there_is_one_optimizer():
    derived = derive_memberships(PARAMETERS, [DECAY, NO_DECAY], GroupRules())
    assert derived["e.weight0"].group == 0


def test_decoupled_learning_rate_both_spellings():
    embedding = parameter("embedding.word_embeddings.weight", 8, 4)
    head, positions = (
        parameter("output_layer.weight", 8, 4),
        parameter("embedding.position_embeddings.weight", 8, 4),
    )
    rules = GroupRules(decoupled_lr=True)
    for own in ({"is_decoupled_lr": True}, {"default_config": False}):
        parameters = [embedding, head, positions, PARAMETERS[0]]
        derived = derive_memberships(parameters, [DECAY, DECAY | own, NO_DECAY], rules)
        assert [m.group for m in derived.values()] == [1, 1, 0, 0]


def test_qk_layernorm_may_decay():
    norm = parameter("self_attention.q_layernorm.weight", 4)
    derived = derive_memberships([norm], [DECAY, NO_DECAY], GroupRules(decay_qk_layernorm=True))
    assert derived["self_attention.q_layernorm.weight"].group == 0


@pytest.mark.parametrize(
    ("groups", "rules", "message"),
    [
        ([], GroupRules(), "stores no optimizer parameter groups"),
        ([DECAY], GroupRules(), r"a\.layer_norm_weight .* fits no group"),
        ([DECAY, DECAY | {"lr": 0.2}, NO_DECAY], GroupRules(), r"a\.weight .* fits groups \[0, 1\]"),
        ([DECAY, NO_DECAY], GroupRules(use_mup=True), "muP"),
    ],
)
def test_what_cannot_be_derived_is_refused_with_the_reason(groups, rules, message):
    with pytest.raises(MappingError, match=message):
        derive_memberships(PARAMETERS, groups, rules)


def test_equal_groups_are_no_ambiguity():
    assert derive_memberships(PARAMETERS[:1], [DECAY, dict(DECAY)], GroupRules())["a.weight"].group == 0


def test_groups_of_every_form_of_the_optimizer_state():
    inner = {"param_groups": [{"lr": 1, "params": [0]}, {"lr": 2, "params": [1]}]}
    assert optimizer_groups({"optimizer": inner}) == [{"lr": 1}, {"lr": 2}]
    assert optimizer_groups({1: {"optimizer": {"param_groups": [{"lr": 3}]}}, 0: {"optimizer": inner}}) == [
        {"lr": 1},
        {"lr": 2},
        {"lr": 3},
    ]
    assert optimizer_groups(inner) == [{"lr": 1}, {"lr": 2}]
    assert optimizer_groups({"param_state_sharding_type": "dp_reshardable"}) == []


NAMES = ["a.weight", "b.linear_fc1.weight"]


def test_a_map_names_equal_groups_as_it_likes_and_the_rest_is_derived():
    derived = {name: Membership(0, "rule") for name in NAMES}
    given = {"model.module.b.linear_fc1.weight": 1}
    merged, notes = merge_map(derived, given, NAMES, [DECAY, dict(DECAY)], strict=False)
    assert groups_of(merged) == {"a.weight": 0, "b.linear_fc1.weight": 1}
    assert notes == ["a.weight: not in the given map, group 0 derived"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_map_that_contradicts_the_attributes_of_groups_names_the_parameters(strict):
    derived = {name: Membership(at, f"rule {at}") for at, name in enumerate(NAMES)}
    given = {"module.a.weight": 1, "b.linear_fc1.weight_w": 0, "b.linear_fc1.weight_v": 0}
    with pytest.raises(MappingError) as caught:
        merge_map(derived, given, NAMES, [DECAY, NO_DECAY], strict)
    for line in (
        "  - a.weight: group 1 in the map, but group 0 by the checkpoint (rule 0)",
        "  - b.linear_fc1.weight: group 0 in the map, but group 1 by the checkpoint (rule 1)",
    ):
        assert line in str(caught.value).splitlines()


def test_a_map_does_alone_where_nothing_can_be_derived():
    given = dict(zip(NAMES, (1, 0), strict=True))
    assert groups_of(merge_map(None, given, NAMES, [DECAY, NO_DECAY], strict=True)[0]) == given


def test_split_names_of_nvidias_converter_are_taken():
    given = {
        "module.module.b.linear_fc1.weight_w": 1,
        "module.module.b.linear_fc1.weight_v": 1,
        "a.weight": 0,
    }
    assert groups_of(merge_map(None, given, NAMES, [DECAY, NO_DECAY], strict=True)[0]) == {
        "a.weight": 0,
        "b.linear_fc1.weight": 1,
    }


@pytest.mark.parametrize(
    ("given", "strict", "message"),
    [
        ({"a.weight": 0, "zzz.weight": 0}, False, r"zzz\.weight: no such parameter"),
        ({"a.weight": 7}, False, "group 7, but the checkpoint has groups 0 to 1"),
        ({"a.weight": True}, False, "group True"),
        ({"a.weight": 0}, True, r"b\.linear_fc1\.weight: not in the map \(--strict-map\)"),
    ],
)
def test_a_map_that_contradicts_the_checkpoint_is_refused(given, strict, message):
    derived = {name: Membership(0, "rule") for name in NAMES}
    with pytest.raises(MappingError, match=message):
        merge_map(derived, given, NAMES, [DECAY, NO_DECAY], strict)


def test_wrappers_are_stripped():
    assert (
        strip_wrappers("module.module.decoder.x") == strip_wrappers("model.module.decoder.x") == "decoder.x"
    )
