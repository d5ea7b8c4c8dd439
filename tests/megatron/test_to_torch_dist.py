"""What a `torch_dist` target holds, decided from a checkpoint made by hand; and what is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.pickle.unpickle import TorchDtype, stand_in
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.megatron.fsdp_dtensor.parameters import FsdpTensor
from ckpt_tools.megatron.fsdp_dtensor.read import FsdpSource, fsdp_model, read_fsdp_source
from ckpt_tools.megatron.fsdp_dtensor.tensors import flatten, unflatten
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.grids import extra_state_keys
from ckpt_tools.megatron.torch_dist.stacking import stack_parameters
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions, build_torch_dist_target
from ckpt_tools.model.catalog import Catalog, TensorEntry, Value
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.views import Source

STATES = ("exp_avg", "exp_avg_sq")
GROUP = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False,
         "max_lr": 0.1, "min_lr": 0.01, "lr": 0.05, "step": 3}  # fmt: skip
ADAMW = {k: v for k, v in GROUP.items() if k != "step"} | {"amsgrad": False}


def common(**args):
    namespace = stand_in("argparse", "Namespace")()
    namespace.state = {"params_dtype": TorchDtype("bfloat16"), **args}
    return CommonState({"args": namespace, "iteration": 3, "checkpoint_version": 3.0}, "items")


def tensor(name, *shape, states=STATES, dtype="float32", step=None):
    kinds = {WEIGHT: dtype} | dict.fromkeys(states, "float32")
    values = {kind: Value(kinds[kind], shape, (Source(f"{kind}/{name}"),)) for kind in kinds}
    return FsdpTensor(name, shape, values, step)


def model(layers=2, experts=2):
    yield tensor("embedding.word_embeddings.weight", 8, 4)
    for layer in range(layers):
        at = f"decoder.layers.{layer}"
        yield tensor(f"{at}.self_attention.linear_qkv.weight", 12, 4)
        yield tensor(f"{at}.self_attention.linear_qkv.layer_norm_weight", 4)
        yield tensor(f"{at}.mlp.router.expert_bias", experts, states=())
        for expert in range(experts):
            yield tensor(f"{at}.mlp.experts.linear_fc2.weight{expert}", 4, 8)


def source(tensors=None, settings=None, **changes):
    tensors = tuple(model() if tensors is None else tensors)
    groups = {t.name: GROUP | ({"wd_mult": 0.0} if len(t.shape) == 1 else {}) for t in tensors if t.states}
    return replace(
        FsdpSource(
            Catalog("", {}, {}), settings or common(), tensors, groups, {"max_lr": 0.1, "min_lr": 0.01}, {}
        ),
        **changes,
    )


def build(src, **options):
    wanted = TorchDistOptions(**options)
    model = fsdp_model(src, tp=wanted.tp, layer_spec=wanted.layer_spec, weights_only=wanted.weights_only)
    return build_torch_dist_target(model, wanted)


def shapes(built):
    return {t.key: (t.dtype, t.shape) for t in built.target.tensors}


def test_layers_and_experts_are_stacked_and_states_stand_beside_the_weights():
    found = shapes(build(source()))
    expert = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    assert found[expert] == ("bfloat16", (2, 2, 4, 8))
    assert found["embedding.word_embeddings.weight"] == ("bfloat16", (8, 4))
    assert found["decoder.layers.mlp.router.expert_bias"] == ("float32", (2, 2))
    for kind in ("param", *STATES):
        assert found[f"optimizer.state.{kind}.{expert}"] == ("float32", (2, 2, 4, 8))
        assert f"optimizer.state.{kind}.decoder.layers.mlp.router.expert_bias" not in found
    assert len(found) == 5 + 3 * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_layer_freq": [1, 1]},
        {"moe_layer_freq": 2},
        {"linear_attention_freq": [0, 1]},
        {"heterogeneous_layers_config_path": "x.json"},
        {"is_hybrid_model": True},
    ],
)
def test_settings_under_which_layers_stand_alone(settings):
    found = shapes(build(source(settings=common(**settings))))
    assert found["decoder.layers.1.mlp.experts.experts.linear_fc2.weight"] == ("bfloat16", (2, 4, 8))
    assert not any(key.startswith("decoder.layers.mlp") for key in found)


@pytest.mark.parametrize("stacked", [None, True])
def test_layers_of_a_mamba_stack_stand_alone_whatever_the_args_say(stacked):
    layers = [tensor(f"decoder.layers.{i}.mixer.out_proj.weight", 4, 8) for i in (0, 1)]
    found = shapes(build(source(layers), stacked=stacked))
    assert {key for key in found if not key.startswith("optimizer")} == {t.name for t in layers}


def test_every_block_decides_on_its_own():
    extra = [tensor(f"{block}{layer}.w.weight", 2, 2) for block in ("vision_model.decoder.layers.", "mtp.layers.")
             for layer in (0, 1)]  # fmt: skip
    odd = tensor("encoder.layers.0.a.weight", 2, 2), tensor("encoder.layers.1.b.weight", 2, 2)
    built = build(source([*model(), *extra, *odd], common(moe_layer_freq=[1, 1])))
    assert {key for key in shapes(built) if "decoder.layers" not in key and "optimizer" not in key} == {
        "embedding.word_embeddings.weight", "mtp.layers.0.w.weight", "mtp.layers.1.w.weight",
        "encoder.layers.0.a.weight", "encoder.layers.1.b.weight",
    }  # fmt: skip
    assert shapes(built)["vision_model.decoder.layers.w.weight"] == ("bfloat16", (2, 2, 2))
    assert "encoder.layers.*: a tensor for each layer (its layers differ)" in built.target.notes


def test_the_user_may_choose_the_form_but_not_the_impossible():
    assert "decoder.layers.0.mlp.experts.experts.linear_fc2.weight" in shapes(build(source(), stacked=False))
    listed = source(settings=common(moe_layer_freq=[1, 1]))
    assert "decoder.layers.mlp.experts.experts.linear_fc2.weight" in shapes(build(listed, stacked=True))
    odd = [*model(), *(tensor(f"decoder.layers.{i}.only_{i}.weight", 2, 2) for i in (0, 1))]
    with pytest.raises(MappingError, match="its layers hold different parameters"):
        build(source(odd), stacked=True)


@pytest.mark.parametrize(
    ("settings", "options", "apart"),
    [
        ({}, {}, False),
        ({"expert_model_parallel_size": 2}, {}, True),
        ({"expert_model_parallel_size": 2}, {"ep": 1}, False),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, {}, True),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, {}, False),
        ({}, {"ep": 4}, True),
    ],
)
def test_routed_experts_have_an_optimizer_of_their_own_where_the_topology_asks(settings, options, apart):
    built = build(source(settings=common(**settings)), **options)
    optimizer = built.common["optimizer"]
    assert set(optimizer) == ({0, 1} if apart else {"optimizer", "param_state_sharding_type"})
    parts = [optimizer[i] for i in (0, 1)] if apart else [optimizer]
    marks = [[(g["wd_mult"], g["is_expert_parallel"]) for g in p["optimizer"]["param_groups"]] for p in parts]
    dense = [(1.0, False), (0.0, False)]
    assert marks == ([dense, [(1.0, True)]] if apart else [dense])
    assert built.groups == ((3, 2, 4) if apart else (7, 2))
    assert all(p["param_state_sharding_type"] == "fully_reshardable" for p in parts)


def test_torch_adams_step_moves_into_the_group():
    tensors = [tensor("a.weight", 2, 2, step=5.0), tensor("b.bias", 2, step=5.0)]
    groups = {"a.weight": ADAMW, "b.bias": ADAMW | {"wd_mult": 0.0}}
    built = build(source(tensors, groups=groups))
    assert built.common["optimizer"]["optimizer"]["param_groups"] == [
        ADAMW | {"step": 5.0},
        ADAMW | {"wd_mult": 0.0, "step": 5.0},
    ]


def test_groups_with_a_learning_rate_of_their_own_stand_between():
    tensors = [tensor("a.bias", 2), tensor("output_layer.weight", 2, 2), tensor("b.weight", 2, 2)]
    groups = {
        "a.bias": GROUP | {"wd_mult": 0.0},
        "output_layer.weight": GROUP | {"max_lr": 0.5},
        "b.weight": GROUP,
    }
    found = build(source(tensors, groups=groups)).common["optimizer"]["optimizer"]["param_groups"]
    assert [(g["max_lr"], g["wd_mult"]) for g in found] == [(0.1, 1.0), (0.5, 1.0), (0.1, 0.0)]


@pytest.mark.parametrize(
    ("groups", "steps", "message"),
    [
        ({"a.weight": GROUP}, {}, r"b\.weight: has optimizer states but no param_to_group_meta"),
        ({"a.weight": GROUP, "b.weight": GROUP, "z": GROUP}, {}, "of z: there is no such parameter"),
        ({"a.weight": GROUP, "b.weight": GROUP | {"step": 4}}, {}, "step: 3 and 4"),
        ({"a.weight": GROUP, "b.weight": GROUP | {"lr": 0.9}}, {}, r"lr: 0\.05 and 0\.9"),
        ({"a.weight": ADAMW, "b.weight": ADAMW}, {"a.weight": 1.0}, r"b\.weight: it has states but no step"),
        ({"a.weight": GROUP, "b.weight": GROUP | {"step": None}}, {}, r"b\.weight: its group has no step"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, steps, message):
    tensors = [tensor(name, 2, 2, step=steps.get(name)) for name in ("a.weight", "b.weight")]
    with pytest.raises(MappingError, match=message):
        build(source(tensors, groups=groups))


def test_without_a_known_training_type_an_fp32_master_needs_one():
    bare = source(settings=CommonState({"iteration": 3}, "items"))
    with pytest.raises(UsageError, match="pass --dtype"):
        build(bare)
    assert shapes(build(bare, dtype="float16"))["embedding.word_embeddings.weight"][0] == "float16"


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"params_dtype": {"_target_": "torch.float16"}}, "float16"),
        ({"bf16": True}, "bfloat16"),
        ({"bf16": False, "fp16": False}, "float32"),
    ],
)
def test_the_training_type_in_a_bridge_configuration(config, dtype):
    bridge = source(settings=CommonState({"iteration": 3}, "items", config))
    assert shapes(build(bridge))["embedding.word_embeddings.weight"][0] == dtype


def test_weights_only_leaves_states_groups_and_scheduler_out_but_keeps_buffers_as_they_are():
    built = build(source(), weights_only=True)
    assert len(shapes(built)) == 5
    assert shapes(built)["decoder.layers.mlp.router.expert_bias"][0] == "float32"
    assert not built.common.keys() & {"optimizer", "opt_param_scheduler"}
    assert "distrib_optim_sharding_type" not in built.common["content_metadata"]


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ([t for t in model(3) if ".1." not in t.name], {}, r"layers \[1\] are missing"),
        (list(model()), {"num_layers": 3}, "num_layers = 3, the weights have 2"),
        (list(model()), {"num_experts": 3}, "say 3 experts, there are 2"),
        ([t for t in model() if t.name != "decoder.layers.1.mlp.experts.linear_fc2.weight1"],
         {"moe_layer_freq": [1, 1]}, r"layers\.1\.mlp.*\(expert 1\) is missing, layer 0 has it"),
        ([t for t in model() if t.name != "decoder.layers.0.self_attention.linear_qkv.weight"], {},
         r"decoder\.layers\.0\.self_attention\.linear_qkv\.weight is missing, layer 1 has it"),
        ([tensor("decoder.layers.0.mlp.experts.linear_fc2.weight1", 2, 2)], {}, "1 of 2 .* slices"),
        ([tensor("x.experts.fc.weight0", 2, 2), tensor("x.experts.fc.weight1", 2, 3)], {}, "different shapes"),
        ([tensor("x.experts.fc.weight0", 2, 2), tensor("x.experts.fc.weight1", 2, 2, states=())], {},
         "different optimizer states"),
        ([tensor("x.experts.fc.weight0", 2, 2), tensor("x.experts.fc.weight1", 2, 2, dtype="bfloat16")], {},
         "different types"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_whole_is_refused(tensors, settings, message):
    with pytest.raises(MappingError, match=message):
        build(source(tensors, common(**settings)))


def test_what_the_source_lacks_is_said():
    narrow = tensor("output_layer.weight", 8, 4, dtype="bfloat16")
    notes = build(source([*model(), narrow])).target.notes
    assert (
        "decoder.layers.0.mlp.router.expert_bias: no optimizer state in the source (buffer or frozen weight)"
        in notes
    )
    assert "output_layer.weight: its master is bfloat16, not fp32; widened" in notes
    assert not any("no optimizer state" in note for note in build(source(), weights_only=True).target.notes)


def test_rng_keeps_its_ranks_and_gets_back_an_empty_tracker():
    built = build(source(rng={(0, 0): [{"random_rng_state": 1}], (0, 1): [{"rng_tracker_states": {"a": 2}}]}))
    rng = {o.key: o.value for o in built.target.objects if o.key.startswith("rng_state")}
    assert rng == {
        "rng_state/shard_0.0_1.2": [[{"random_rng_state": 1, "rng_tracker_states": {}}]],
        "rng_state/shard_0.1_1.2": [[{"rng_tracker_states": {"a": 2}}]],
    }
    assert any("--no-load-rng" in note for note in build(source()).target.notes)


def test_extra_states_of_linear_modules_and_of_transformer_engines_own():
    parameters = fsdp_model(source(model(layers=1))).parameters
    stacks, _ = stack_parameters(parameters, common(), None)
    local = extra_state_keys(stacks, transformer_engine=False)
    assert local == (
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_1",
        "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_0.0_1.2",
        "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_0.1_1.2",
    )
    attention = [
        tensor("layers.0.self_attention.linear_proj.weight", 2, 2),
        tensor("final_layernorm.weight", 2),
    ]
    stacks, _ = stack_parameters(fsdp_model(source(attention)).parameters, common(), None)
    assert extra_state_keys(stacks, transformer_engine=True) == (
        "layers.self_attention.linear_proj._extra_state/shard_0_1",
        "layers.self_attention.core_attention._extra_state/shard_0_1",
        "final_layernorm._extra_state/shard_0_1",
    )


def test_extra_states_that_hybrid_models_ask_for():
    """MambaModel of core 0.16.1 fails to load without that of its output layer, which GPTModel leaves out."""
    hybrid = [
        tensor("decoder.layers.0.mlp.fc1_latent_proj.weight", 2, 2),
        tensor("decoder.final_norm.weight", 2),
    ]
    stacks, _ = stack_parameters(fsdp_model(source(hybrid)).parameters, common(), None)
    assert extra_state_keys(stacks, transformer_engine=True) == (
        "decoder.layers.mlp.fc1_latent_proj._extra_state/shard_0_1",
        "output_layer._extra_state/shard_0_1",
        "decoder.final_norm._extra_state/shard_0_1",
    )


def entry(key, *shape, dtype="float32"):
    return key, TensorEntry(key, dtype, shape, ())


NO_FILES: Any = None  # nothing is read: keys are refused before


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ([entry("model.module.a.weight_w", 2, 2)], MappingError, r"stored as \['a.weight_w'\]"),
        ([entry("model.module.a.weight_w", 2, 2), entry("model.module.a.weight_v", 3, 2)],
         MappingError, "halves are"),
        ([entry("model.module.a.weight", 2), entry("model.module.a.weight_v", 2)], MappingError, "expected it whole"),
        ([entry("optimizer.state.module.a.weight.exp_avg", 2)], MappingError, "there is no such weight"),
        ([entry("model.module.a.weight", 2), entry("optimizer.state.module.a.weight.exp_avg", 3)],
         MappingError, r"shape \(3,\) does not fit"),
        ([entry("model.module.a.weight_w", 2), entry("model.module.a.weight_v", 2),
          entry("optimizer.state.module.a.weight_w.exp_avg", 2)], MappingError, "halves have states"),
        ([entry("model.module.a.weight", 2), entry("optimizer.state.module.a.weight.fp32_param", 2)],
         UnsupportedCheckpointError, "fp32 masters stand among the optimizer states"),
        ([entry("surprise", 2)], MappingError, "no rule accounts for.*\n.*surprise"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_together_are_refused(entries, error, message):
    with pytest.raises(error, match=message):
        read_fsdp_source(NO_FILES, Catalog("", dict(entries), {}), common())


def test_unknown_keys_can_be_left_out(tmp_path):
    catalog = Catalog("", dict([entry("surprise", 2), entry("model.module.a.weight", 2)]), {})
    read = read_fsdp_source(LocalFiles(str(tmp_path)), catalog, common(), ignored=("surp*",))
    assert [t.name for t in read.tensors] == ["a.weight"]
    assert read.dropped == ("surprise: --ignore-keys",)


names = st.sampled_from(["a", "b", "(0, 0)", "model-parallel-rng"])
nested = st.recursive(
    st.one_of(st.integers(), st.text(max_size=2), st.just((0, 1)), st.just([1, 2])),
    lambda below: (
        st.lists(st.dictionaries(names, below, min_size=1), min_size=1, max_size=3)
        | st.dictionaries(names, below, min_size=1)
    ),
    max_leaves=8,
)


@given(st.dictionaries(names, nested, min_size=1))
def test_unflatten_undoes_flatten(value):
    assert unflatten(dict(flatten(value, ()))) == value
