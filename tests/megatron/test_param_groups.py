"""Groups by attributes, and what a user's map may change."""

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.fsdp_dtensor.parameters import LiveParameter, Rows
from ckpt_tools.megatron.param_groups import GroupRules, Membership, derive_memberships, merge_map
from ckpt_tools.megatron.run_state.stored_values import optimizer_groups
from ckpt_tools.model.model import Parameter

DECAY = {"wd_mult": 1.0, "is_expert_parallel": False, "lr": 0.1}
NO_DECAY = {"wd_mult": 0.0, "is_expert_parallel": False, "lr": 0.1}
EXPERT = {"wd_mult": 1.0, "is_expert_parallel": True, "lr": 0.1}


def parameter(name, *shape, expert=None, group=None):
    stored = Parameter(name, shape, "bfloat16", {}, expert, group)
    return LiveParameter(name, name, shape, (Rows(stored, 0, shape[0]),))


PARAMETERS = [
    parameter("a.weight", 4, 4),
    parameter("a.layer_norm_weight", 4),
    parameter("a.bias", 4, 1),
    parameter("e.weight0", 4, 4, expert=0),
]
WITH_RATES = [
    parameter(f"{name}.weight", 8, 4)
    for name in ("embedding.word_embeddings", "output_layer", "embedding.position_embeddings", "a")
]
QK_NORM = [parameter(f"self_attention.{one}_layernorm.weight", 4) for one in "qk"]


@pytest.mark.parametrize(
    ("parameters", "groups", "rules", "expected"),
    [
        (PARAMETERS, [DECAY, NO_DECAY, EXPERT], GroupRules(experts_apart=True), [0, 1, 1, 2]),
        (PARAMETERS, [DECAY, NO_DECAY], GroupRules(), [0, 1, 1, 0]),  # one optimizer for all
        (QK_NORM, [DECAY, NO_DECAY], GroupRules(), [1, 1]),
        (QK_NORM, [DECAY, NO_DECAY], GroupRules(decay_qk_layernorm=True), [0, 0]),
        (PARAMETERS[:1], [DECAY, dict(DECAY)], GroupRules(), [0]),  # equal groups are no ambiguity
        *((WITH_RATES, [DECAY, DECAY | own, NO_DECAY], GroupRules(decoupled_lr=True), [1, 1, 0, 0])
          for own in ({"is_decoupled_lr": True}, {"default_config": False})),  # before core 0.16, and since
        ([parameter("a.weight", 4, 4, group=1)], [DECAY, NO_DECAY], GroupRules(), [1]),  # as stored
        (PARAMETERS, [], GroupRules(), "stores no optimizer parameter groups"),
        (PARAMETERS, [DECAY], GroupRules(), r"a\.layer_norm_weight .* fits no group"),
        (PARAMETERS, [DECAY, DECAY | {"lr": 0.2}, NO_DECAY], GroupRules(), r"a\.weight .* fits groups \[0, 1\]"),
        (PARAMETERS, [DECAY, NO_DECAY], GroupRules(use_mup=True), "muP"),
    ],
)  # fmt: skip
def test_the_group_of_every_parameter(parameters, groups, rules, expected):
    if isinstance(expected, str):
        with pytest.raises(MappingError, match=expected):
            derive_memberships(parameters, groups, rules)
        return
    derived = derive_memberships(parameters, groups, rules)
    assert {name: m.group for name, m in derived.items()} == dict(
        zip((p.group_name for p in parameters), expected, strict=True)
    )
    assert all(("routed expert" in m.rule) == rules.experts_apart for m in derived.values())


INNER = {"param_groups": [{"lr": 1, "params": [0]}, {"lr": 2, "params": [1]}]}


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        ({"optimizer": INNER}, [1, 2]),
        ({1: {"optimizer": {"param_groups": [{"lr": 3}]}}, 0: {"optimizer": INNER}}, [1, 2, 3]),
        (INNER, [1, 2]),
        ({"param_state_sharding_type": "dp_reshardable"}, []),
    ],
)
def test_groups_of_every_form_of_the_optimizer_state(optimizer, rates):
    assert optimizer_groups(optimizer) == [{"lr": rate} for rate in rates]


NAMES = ["a.weight", "b.linear_fc1.weight"]
HALVES = {f"module.module.b.linear_fc1.weight_{half}": 1 for half in "wv"}  # as NVIDIA's converter names them


@pytest.mark.parametrize(
    ("groups", "derived", "given", "strict", "expected"),
    [
        ([DECAY, dict(DECAY)], [0, 0], {"model.module.b.linear_fc1.weight": 1}, False, [0, 1]),
        ([DECAY, NO_DECAY], None, dict(zip(NAMES, (1, 0), strict=True)), True, [1, 0]),
        ([DECAY, NO_DECAY], None, {**HALVES, "a.weight": 0}, True, [0, 1]),
        ([DECAY, NO_DECAY], [0, 0], {"a.weight": 0, "zzz.weight": 0}, False, r"zzz\.weight: no such parameter"),
        ([DECAY, NO_DECAY], [0, 0], {"a.weight": 7}, False, "group 7, but the checkpoint has groups 0 to 1"),
        ([DECAY, NO_DECAY], [0, 0], {"a.weight": True}, False, "group True"),
        ([DECAY, NO_DECAY], [0, 0], {"a.weight": 0}, True, r"b\.linear_fc1\.weight: not in the map \(--strict-map"),
        ([DECAY, NO_DECAY], None, {"a.weight": 0}, False, "not in the map, and its group cannot be derived"),
        ([DECAY, NO_DECAY], [0, 1], {"module.a.weight": 1}, False,
         r"a\.weight: group 1 in the map, but group 0 by the checkpoint \(rule"),
        ([DECAY, NO_DECAY], [1, 0], {**HALVES, "a.weight": 1}, True, "b.linear_fc1.weight: group 1 in the map"),
    ],
)  # fmt: skip
def test_a_map_over_what_is_derived(groups, derived, given, strict, expected):
    members = derived and {
        name: Membership(group, "rule") for name, group in zip(NAMES, derived, strict=True)
    }
    if isinstance(expected, str):
        with pytest.raises(MappingError, match=expected):
            merge_map(members, given, NAMES, groups, strict)
        return
    merged, notes = merge_map(members, given, NAMES, groups, strict)
    assert [merged[name].group for name in NAMES] == expected
    assert notes == ([] if strict else ["a.weight: not in the given map, group 0 derived"])
