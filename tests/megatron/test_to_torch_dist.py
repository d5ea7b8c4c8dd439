"""What a `torch_dist` target holds, decided from a checkpoint made by hand; and what is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.pickle.unpickle import TorchDtype, stand_in
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
    ("settings", "asked", "stacked"),
    [
        ({}, None, True),
        ({}, False, False),
        ({"moe_layer_freq": [1, 1]}, None, False),
        ({"moe_layer_freq": [1, 1]}, True, True),
        ({"moe_layer_freq": 2}, None, False),
        ({"linear_attention_freq": [0, 1]}, None, False),
        ({"heterogeneous_layers_config_path": "x.json"}, None, False),
        ({"is_hybrid_model": True}, None, False),
    ],
)
def test_whether_layers_are_stacked(settings, asked, stacked):
    found = shapes(build(source(settings=common(**settings)), stacked=asked))
    expert = "mlp.experts.experts.linear_fc2.weight"
    assert (f"decoder.layers.1.{expert}" in found, f"decoder.layers.{expert}" in found) == (
        not stacked,
        stacked,
    )


@pytest.mark.parametrize("stacked", [None, True])
def test_layers_of_a_mamba_stack_are_never_stacked(stacked):
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


def test_layers_that_differ_cannot_be_stacked():
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


@pytest.mark.parametrize(
    ("groups", "step", "expected"),
    [
        # torch Adam's step moves into the group
        ([ADAMW, ADAMW | {"wd_mult": 0.0}], 5.0, [ADAMW | {"step": 5.0}, ADAMW | {"wd_mult": 0.0, "step": 5.0}]),
        # a rate of its own is placed between
        ([GROUP | {"wd_mult": 0.0}, GROUP | {"max_lr": 0.5}, GROUP], None,
         [GROUP, GROUP | {"max_lr": 0.5}, GROUP | {"wd_mult": 0.0}]),
    ],
)  # fmt: skip
def test_groups_in_the_order_of_their_overrides(groups, step, expected):
    tensors = [
        tensor(f"{n}.weight", *(2, 2)[not group["wd_mult"] :], step=step) for n, group in enumerate(groups)
    ]
    by_name = {t.name: group for t, group in zip(tensors, groups, strict=True)}
    found = build(source(tensors, groups=by_name)).common["optimizer"]["optimizer"]["param_groups"]
    assert found == expected


@pytest.mark.parametrize(
    ("groups", "steps", "message"),
    [
        ({"a.weight": GROUP}, {}, r"b\.weight: has optimizer states but no param_to_group_meta"),
        ({"a.weight": GROUP, "b.weight": GROUP, "z": GROUP}, {}, "of z: there is no such parameter"),
        ({"a.weight": GROUP, "b.weight": GROUP | {"step": 4}}, {}, "step: 3 and 4"),
        ({"a.weight": GROUP, "b.weight": GROUP | {"lr": 0.9}}, {}, r"lr: 0\.05 and 0\.9"),
        ({"a.weight": ADAMW, "b.weight": ADAMW}, {"a.weight": 1.0}, r"b\.weight: it has states but no step"),
        ({"a.weight": GROUP, "b.weight": GROUP | {"step": None}}, {}, r"b\.weight: its group has no step"),
        ({"a.weight": GROUP, "b.weight": GROUP}, {"a.weight": 7.0}, r"a\.weight: its own step is 7, its group's 3"),
        ({"a.weight": GROUP, "b.weight": GROUP | {"wd_mult": 0.0}}, {},
         r"b\.weight: wd_mult is 0\.0, a job makes it 1\.0"),
    ],
)  # fmt: skip
def test_groups_that_do_not_fit_are_refused(groups, steps, message):
    tensors = [tensor(name, 2, 2, step=steps.get(name)) for name in ("a.weight", "b.weight")]
    with pytest.raises(MappingError, match=message):
        build(source(tensors, groups=groups))


@pytest.mark.parametrize(
    ("settings", "is_known"),
    [
        (common(), False),
        (common(apply_wd_to_qk_layernorm=True), True),
        (CommonState({}, None, {"bf16": True}, {"apply_wd_to_qk_layernorm": True}), True),
    ],
)
def test_groups_that_a_job_derives_from_its_settings(settings, is_known):
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    made = source([tensor(name, 2)], settings, groups={name: GROUP})
    if is_known:
        assert build(made).groups == (1,)
    else:
        with pytest.raises(MappingError, match=r"q_layernorm\.weight: wd_mult is 1\.0"):
            build(made)


@pytest.mark.parametrize(
    ("config", "asked", "dtype"),
    [
        ({"params_dtype": {"_target_": "torch.float16"}}, None, "float16"),
        ({"bf16": True}, None, "bfloat16"),
        ({"bf16": False, "fp16": False}, None, "float32"),
        ({}, "float16", "float16"),
        ({}, None, None),
    ],
)
def test_the_training_type_by_a_bridge_configuration_or_as_asked_for(config, asked, dtype):
    bridge = source(settings=CommonState({"iteration": 3}, "items", config))
    if dtype is None:
        with pytest.raises(UsageError, match="pass --dtype"):
            build(bridge)
    else:
        assert shapes(build(bridge, dtype=asked))["embedding.word_embeddings.weight"][0] == dtype


def test_masters_of_contradicted_training_types_are_refused():
    with pytest.raises(
        MappingError, match=r"params_dtype is bfloat16, bf16 False and fp16 True: .* pass --dtype"
    ):
        build(source(settings=common(bf16=False, fp16=True)))
    assert build(source(settings=common(bf16=False, fp16=True)), dtype="bfloat16")


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
        *((list(model()), {"num_experts": n}, f"say {n} experts, there are 2") for n in (1, 3)),
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


@pytest.mark.parametrize(
    ("tensors", "transformer_engine", "expected"),
    [
        ([*model(layers=1)], False,
         ["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_1",
          *(f"decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_0.{e}_1.2" for e in (0, 1))]),
        ([tensor("layers.0.self_attention.linear_proj.weight", 2, 2), tensor("final_layernorm.weight", 2)], True,
         [f"{module}._extra_state/shard_0_1" for module in
          ("layers.self_attention.linear_proj", "layers.self_attention.core_attention", "final_layernorm")]),
        # MambaModel of core 0.16.1 fails to load without that of its output layer, which GPTModel leaves out
        ([tensor("decoder.layers.0.mlp.fc1_latent_proj.weight", 2, 2), tensor("decoder.final_norm.weight", 2)], True,
         [f"{module}._extra_state/shard_0_1" for module in
          ("decoder.layers.mlp.fc1_latent_proj", "output_layer", "decoder.final_norm")]),
    ],
)  # fmt: skip
def test_extra_states_that_modules_ask_for(tensors, transformer_engine, expected):
    stacks, _ = stack_parameters(fsdp_model(source(tensors)).parameters, common(), None)
    assert list(extra_state_keys(stacks, transformer_engine)) == expected


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
         UnsupportedCheckpointError, "fp32 masters are among the optimizer states"),
        ([entry("surprise", 2)], MappingError, "no rule accounts for.*\n.*surprise"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_together_are_refused(entries, error, message):
    with pytest.raises(error, match=message):
        read_fsdp_source(NO_FILES, Catalog("", dict(entries), {}), common())


names = st.sampled_from(["a", "b", "(0, 0)", "model-parallel-rng"])
leaf = st.sampled_from([3, "text", (0, 1), [1, 2]])
of_leaves = st.dictionaries(names, leaf, min_size=1, max_size=3)
nested = st.one_of(leaf, of_leaves, st.lists(of_leaves, min_size=1, max_size=3))


@given(st.dictionaries(names, nested | st.dictionaries(names, nested, min_size=1), min_size=1))
def test_unflatten_undoes_flatten(value):
    assert unflatten(dict(flatten(value, ()))) == value
