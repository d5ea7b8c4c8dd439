"""Sources of kinds that no real checkpoint at hand has, made synthetically by the rules of the format."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_tools import ToTorchDistOptions, convert_to_fsdp_dtensor, convert_to_torch_dist
from ckpt_tools.cli.app import run
from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from tests.commands import oracle
from tests.commands.made import fsdp, torch_dist
from tests.commands.rewritten import STATES, read, write
from tests.conftest import DATA, fixture_dir
from tests.damage import copy_of, drop_key, metadata_of

LLAMA = DATA / "core019_llama_tp2_fully_reshardable" / "iter_0000002"
MOE = fixture_dir("core019_moe_ep2_fully_reshardable") / "iter_0000002"
STATE = "optimizer.state.module.module.module."
META = "optimizer.param_to_group_meta.module.module.module."


def notes_of(source: Path, output: Path) -> str:
    return "\n".join(convert_to_fsdp_dtensor(source, output).notes)


def objects(folder: Path) -> dict[str, object]:
    """Objects but args and rng states, which are no matter here."""
    kinds = oracle.metadata(folder).state_dict_metadata
    return {
        key: oracle.item(folder, key)
        for key, m in kinds.items()
        if not isinstance(m, TensorStorageMetadata) and key != "args" and "rng_state" not in key
    }


def assert_same(a: Path, b: Path) -> None:
    oracle.assert_same(a, b)
    assert objects(a) == objects(b)


def test_what_is_only_rewritten_converts_to_the_same(tmp_path):
    for name, source in (("llama", LLAMA), ("moe", MOE)):
        assert_same(fsdp(source), fsdp(write(tmp_path / name, read(source))))


@pytest.mark.parametrize("experts", ["grouped", "sequential"])
def test_singleton_local_shards(tmp_path, experts):
    """formats 2.1: a key for every expert and for either half of a gated fc1."""
    parts = read(MOE)

    def apart(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if ".experts.experts." in key:
            head, _, leaf = key.rpartition("experts.experts.")
            pieces = {f"{head}experts.experts.{e}.{leaf}": one for e, one in enumerate(tensor)}
        else:
            pieces = {key: tensor}
        found: dict[str, torch.Tensor] = {}
        for name, piece in pieces.items():
            found |= (
                {name: piece}
                if "linear_fc1.weight" not in name
                else dict(zip((f"{name}_w", f"{name}_v"), piece.chunk(2), strict=True))
            )
        return found

    for key in [k for k in parts.tensors if not k.startswith("optimizer.") and ".mlp." in k]:
        parts.map(key, partial(apart, key))
    assert any(key.endswith("experts.experts.3.linear_fc1.weight_v") for key in parts.tensors)
    single = write(tmp_path / "single", parts)
    assert_same(fsdp(MOE, experts=experts), fsdp(single, experts=experts))
    oracle.assert_same(torch_dist(MOE, dialect="main"), torch_dist(single, dialect="main"))


@pytest.mark.parametrize("masters", [True, False])
def test_models_trained_in_fp32(tmp_path, masters):
    """formats 5.2: no Float16Module, so optimizer names have one `module.` less."""
    parts = read(LLAMA)
    parts.args.update(bf16=False, fp16=False, params_dtype="torch.float32")
    for key in [k for k in parts.tensors if k.startswith("optimizer.state.param.")]:
        parts.tensors[key.removeprefix("optimizer.state.param.")] = parts.tensors[key].clone()
        if not masters:
            del parts.tensors[key]
    out, usual = fsdp(write(tmp_path / "fp32", parts)), fsdp(LLAMA)
    shorter = {
        key.replace(STATE, "optimizer.state.module.module."): t for key, t in oracle.tensors(usual).items()
    }
    ours = oracle.tensors(out)
    oracle.assert_same(ours, shorter)
    assert objects(out) == {
        k.replace(META, "optimizer.param_to_group_meta.module.module."): v for k, v in objects(usual).items()
    }
    stored = oracle.tensors(torch_dist(out))
    for key, tensor in parts.tensors.items():
        assert oracle.same_bytes(stored[key], tensor), key


def test_fp16_with_a_loss_scaler_there_and_back(tmp_path):
    parts = read(LLAMA)
    parts.args.update(bf16=False, fp16=True, params_dtype="torch.float16")
    for key in [k for k in parts.tensors if k.startswith("optimizer.state.param.")]:
        parts.tensors[key.removeprefix("optimizer.state.param.")] = parts.tensors[key].half()
    scaler = {"scale": torch.tensor([65536.0]), "growth_tracker": 7, "hysteresis_tracker": 2}
    parts.common["optimizer"]["grad_scaler"] = scaler
    out = fsdp(write(tmp_path / "fp16", parts))
    assert oracle.tensors(out)["optimizer.grad_scaler.scale"].item() == 65536
    assert oracle.item(out, "optimizer.grad_scaler.growth_tracker") == 7
    back = torch_dist(out)
    (common,) = oracle.item(back, "common_state/shard_0_1")
    assert common["optimizer"]["grad_scaler"] == scaler
    stored = oracle.tensors(back)
    assert [key for key in parts.tensors if not oracle.same_bytes(stored[key], parts.tensors[key])] == []


@pytest.mark.parametrize("flag", [True, False])
def test_a_learning_rate_of_their_own_for_embedding_and_output(tmp_path, flag):
    """formats 6.3: `is_decoupled_lr` up to core 0.15, since then only `max_lr` and `default_config` tell."""
    parts = read(LLAMA)
    parts.args["decoupled_lr"] = 0.5
    own = dict(parts.groups[0], max_lr=0.5, min_lr=0.25, lr=0.4)
    own.update({"is_decoupled_lr": True} if flag else {"default_config": False})
    for group in parts.groups:
        group.pop("default_config") if flag else None
    own.pop("default_config") if flag else None
    parts.common["optimizer"]["optimizer"]["param_groups"].insert(1, own)
    out = fsdp(write(tmp_path / "in", parts))
    for key, value in objects(out).items():
        if key.startswith(META) and key.endswith(("max_lr", "default_config")):
            own_rate = key.removeprefix(META).startswith(("embedding.word_embeddings", "output_layer"))
            assert (
                value
                == {"max_lr": 0.5 if own_rate else 0.01, "default_config": not own_rate}[
                    key.rpartition(".")[2]
                ]
            ), key


def test_gates_of_shared_experts_and_norms_of_queries_and_keys(tmp_path):
    """formats 6.3: what has one dimension does not decay, except with apply_wd_to_qk_layernorm; [1, H] has two."""
    parts = read(MOE)
    attention = "decoder.layers.0.self_attention"
    parts.args.update(apply_wd_to_qk_layernorm=True, qk_layernorm=True)
    masters = {
        name: parts.add(name, shape)
        for name, shape in [
            ("decoder.layers.1.mlp.shared_experts.gate_weight", (1, 32)),
            (f"{attention}.q_layernorm.weight", (8,)),
            (f"{attention}.k_layernorm.weight", (8,)),
            (f"{attention}.core_attention.softmax_offset", (4,)),
        ]
    }
    out = fsdp(write(tmp_path / "in", parts))
    ours = oracle.tensors(out)
    for name, master in masters.items():
        assert oracle.same_bytes(ours[f"model.module.{name}"], master)
        assert oracle.item(out, f"{META}{name}.wd_mult") == (0.0 if "softmax" in name else 1.0)


def test_a_nemo_folder(tmp_path):
    """formats 2: `weights/` beside other folders, `module.` before every name, fields of its own spelling."""
    parts = read(LLAMA)
    parts.rename(lambda name: f"module.{name}")
    for group in parts.groups:
        group["pre_wd_mult"], group["pre_lr_mult"] = group.pop("wd_mult"), group.pop("lr_mult")
    (tmp_path / "nemo" / "context").mkdir(parents=True)
    write(tmp_path / "nemo" / "weights", parts)
    convert_to_fsdp_dtensor(tmp_path / "nemo", tmp_path / "out")
    out, usual = oracle.files_of(tmp_path / "out"), fsdp(LLAMA)
    oracle.assert_same(out, usual)
    assert objects(usual).items() <= objects(out).items()


def test_rng_states_with_a_data_parallel_axis(tmp_path):
    """formats 1.6: Bridge with expert parallelism has (pp, tp, dp); the target keeps one list for each (pp, tp)."""
    parts = read(LLAMA)
    for key in [k for k in parts.objects if k.startswith("rng_state/")]:
        tp = key.partition("shard_0.")[2][0]
        (states,) = parts.objects.pop(key)
        for dp in (0, 1):
            parts.objects[f"rng_state/shard_0.{tp}.{dp}_1.2.2"] = [
                [dict(states[0], torch_rng_state=states[0]["torch_rng_state"] + dp)]
            ]
    out = fsdp(write(tmp_path / "in", parts))
    oracle.assert_same(out, fsdp(LLAMA))


def test_states_without_masters(tmp_path):
    """An optimizer of a bf16 model that keeps no fp32 copies: the weights are all there is."""
    parts = read(LLAMA)
    for key in [k for k in parts.tensors if k.startswith("optimizer.state.param.")]:
        del parts.tensors[key]
    ours = oracle.tensors(fsdp(write(tmp_path / "in", parts)))
    theirs = oracle.tensors(fsdp(LLAMA))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert oracle.same_bytes(ours[key], tensor.bfloat16() if key.startswith("model.") else tensor), key


@pytest.mark.parametrize("state", STATES)
def test_a_state_that_only_one_parameter_lacks_is_refused(tmp_path, state):
    """Else its weights would silently lose their fp32 masters, or a strict load fail much later."""
    parts = read(LLAMA)
    del parts.tensors[f"optimizer.state.{state}.decoder.final_layernorm.weight"]
    source = write(tmp_path / "in", parts)
    name = "master" if state == "param" else state
    with pytest.raises(MappingError, match=rf"(?m)decoder\.final_layernorm\.weight: no {name}$"):
        convert_to_fsdp_dtensor(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]
    fsdp(source, weights_only=True, dtype="bfloat16")


DP_GROUP = "optimizer.distributed.dp_group_idx_"
BUCKET = "1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
WHOLE = (
    ["convert", "--to", "torch_dist", "--target", "main"],
    ["convert", "--gpus", "1"],
    ["slice", "--layers", "0:1"],
)
WEIGHTS = (
    ["convert", "--to", "torch_dist", "--weights-only"],
    ["convert", "--gpus", "1", "--weights-only"],
    ["strip", "--check-masters", "none"],
)


@pytest.mark.parametrize(
    ("name", "lost", "refused", "said"),
    [
        ("core019_llama_tp2_fully_reshardable", "optimizer.state.param.output_layer.weight", WHOLE,
         "output_layer.weight: no master"),
        ("core019_llama_tp2_dp_reshardable", f"{DP_GROUP}{BUCKET}.exp_avg", WHOLE, f"{DP_GROUP}{BUCKET}: no exp_avg"),
        ("core019_llama_dp2_dp_reshardable", f"{DP_GROUP}0.optimizer/shard_0_1", WHOLE,
         "the checkpoint stores no optimizer parameter groups"),
        ("core019_llama_tp2_fully_reshardable", "decoder.final_layernorm.weight", (*WHOLE, *WEIGHTS),
         "decoder.final_layernorm.weight"),
    ],
)  # fmt: skip
def test_what_was_lost_is_named_whoever_writes(name, lost, refused, said, tmp_path, capsys):
    root = copy_of(name, tmp_path)
    with metadata_of(root) as metadata:
        drop_key(metadata, lost)
    for n, (verb, *options) in enumerate((*WHOLE, *WEIGHTS)):
        code = run([verb, str(root), str(tmp_path / str(n)), *options])
        assert code in ((4, 5) if [verb, *options] in refused else (0,)), options
        assert (said in capsys.readouterr().err) == (code > 0)


def test_an_fp32_weight_needs_no_master(tmp_path):
    """Optimizers that are not distributed keep masters of half-precision weights only."""
    parts = read(LLAMA)
    name = "decoder.final_layernorm.weight"
    parts.tensors[name] = parts.tensors.pop(f"optimizer.state.param.{name}")
    ours = oracle.tensors(fsdp(write(tmp_path / "in", parts)))
    assert oracle.same_bytes(ours[f"model.module.{name}"], parts.tensors[name])


def test_states_that_are_not_adams_are_said(tmp_path):
    parts = read(LLAMA)
    for key in [k for k in parts.tensors if ".exp_avg_sq." in k and "norm" not in k]:
        del parts.tensors[key]
        other = key.replace(".exp_avg_sq.", ".exp_avg.")
        parts.tensors[other.replace(".exp_avg.", ".momentum_buffer.")] = parts.tensors.pop(other)
    notes = notes_of(write(tmp_path / "in", parts), tmp_path / "out")
    assert "no optimizer is written: Megatron-FSDP resumes from Adam's" in notes
    assert "no optimizer" not in notes_of(LLAMA, tmp_path / "usual")


def test_steps_that_are_tensors_become_numbers(tmp_path):
    parts = read(LLAMA)
    for group in parts.groups:
        group["step"] = torch.tensor(2.0)
    assert_same(fsdp(write(tmp_path / "in", parts)), fsdp(LLAMA))


def test_what_the_common_state_lacks_is_said(tmp_path):
    parts = read(LLAMA)
    del parts.common["iteration"], parts.common["opt_param_scheduler"]
    notes = notes_of(write(tmp_path / "in", parts), tmp_path / "out")
    assert "iteration: the source does not tell it" in notes
    assert "opt_param_scheduler: the source has none" in notes
    back = ToTorchDistOptions(target=TorchDistOptions(weights_only=True))
    notes = "\n".join(convert_to_torch_dist(tmp_path / "in", tmp_path / "back", back).notes)
    assert "iteration: the source does not tell it" in notes


def test_buffers_keep_their_type(tmp_path):
    parts = read(MOE)
    parts.tensors["decoder.positions"] = torch.arange(5)
    ours = oracle.tensors(fsdp(write(tmp_path / "in", parts), weights_only=True, dtype="bfloat16"))
    kinds = {key: tensor.dtype for key, tensor in ours.items() if tensor.dtype is not torch.bfloat16}
    assert kinds == {
        "model.module.decoder.positions": torch.int64,
        "model.module.decoder.layers.1.mlp.router.expert_bias": torch.float32,
    }
