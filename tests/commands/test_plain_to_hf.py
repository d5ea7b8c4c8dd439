"""`export-hf` of PyTorch checkpoints whose tensors have Hugging Face names: each is written, or all are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpt_tools.cli.app import run
from tests.commands import oracle

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24, "hidden_size": 8,
    "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = {
    "self_attn.q_proj.weight": (8, 8), "self_attn.k_proj.weight": (4, 8), "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8), "mlp.gate_proj.weight": (20, 8), "mlp.up_proj.weight": (20, 8),
    "mlp.down_proj.weight": (8, 20), "input_layernorm.weight": (8,), "post_attention_layernorm.weight": (8,),
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def llama(dtype: torch.dtype = torch.float32) -> Tensors:
    """The state dict of a tiny LlamaForCausalLM."""
    shapes = {"model.embed_tokens.weight": (24, 8), "model.norm.weight": (8,), "lm_head.weight": (24, 8)}
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in LAYER.items()}
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def reference(folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def wrapped(model: Tensors) -> Tensors:
    """As torch.compile and FSDP with checkpointed layers name them."""
    inner = "_fsdp_wrapped_module._checkpoint_wrapped_module."
    return {
        "_orig_mod." + (name.replace(".mlp.", f".{inner}mlp.") if ".1." in name else name): tensor
        for name, tensor in model.items()
    }


OPTIMIZER = {
    "state": {"model.norm.weight": {"exp_avg": torch.ones(8), "step": torch.tensor(3.0)}},
    "param_groups": [{"params": ["model.norm.weight"], "lr": 0.1}],
}
# What a program saves, what stands in front of its names, and what else there is that is left out and said.
PROGRAMS: dict[str, tuple[Callable[[Tensors], dict[str, Any]], str, list[str]]] = {
    "slime": (lambda m: {"model_state": {"model": m}}, "model_state.model.", []),
    "tutorial": (lambda m: {"app": {"model": m, "optim": OPTIMIZER}}, "app.model.",
                 ["app.optim.*: optimizer states (4 keys, 36 bytes in tensors)"]),
    "accelerate": (lambda m: {"model": m}, "model.", []),
    "torchtitan": (lambda m: {**m, "optimizer": OPTIMIZER, "train_state": {"step": torch.tensor(3)}}, "",
                   ["optimizer.state.*: optimizer states (2 keys, 36 bytes in tensors)",
                    "optimizer.param_groups.*: optimizer states (2 keys, 0 bytes in tensors)",
                    "train_state.*: not of the model (1 keys, 8 bytes in tensors)"]),
    "ddp": (lambda m: {"model": {f"module.{name}": t for name, t in m.items()}}, "model.module.", []),
    "compiled": (lambda m: {"net": wrapped(m), "ema": {"decay": 0.9}}, "net.",
                 ["ema.*: not of the model (1 keys, 0 bytes in tensors)"]),
    "rl": (lambda m: {f"actor.{name}": t for name, t in m.items()}, "actor.", []),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_names_are_found_behind_what_a_program_puts_in_front(program, tmp_path, capsys):
    state, prefix, left_out = PROGRAMS[program]
    truth = llama()
    source = saved(tmp_path / "dcp", state(truth))
    hf = reference(tmp_path / "hf")
    assert run(["export-hf", str(source), str(tmp_path / "out"), "--hf-config", str(hf), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    oracle.assert_same(oracle.model(tmp_path / "out"), truth)
    assert (f"the names are those behind {prefix!r} in the checkpoint" in report["notes"]) == bool(prefix)
    assert report["dropped"] == left_out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == CONFIG | {"torch_dtype": "float32"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"


def test_convert_makes_the_same_in_shards_with_an_index(tmp_path):
    source = saved(tmp_path / "dcp", {"model": llama(torch.bfloat16)})
    hf, out = reference(tmp_path / "hf"), tmp_path / "out"
    words = [
        "convert",
        str(source),
        str(out),
        "--to",
        "hf",
        "--hf-config",
        str(hf),
        "--max-shard-size",
        "1KB",
    ]
    assert run(words) == 0
    oracle.assert_same(oracle.model(out), llama(torch.bfloat16))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == llama().keys() and len(set(index["weight_map"].values())) > 2
    assert json.loads((out / "config.json").read_text()) == CONFIG


def test_a_cast_is_torchs_and_only_made_when_it_is_asked_for(tmp_path, capsys):
    source = saved(tmp_path / "dcp", {"model": llama()})
    hf, out = reference(tmp_path / "hf"), tmp_path / "out"
    words = ["export-hf", str(source), str(out), "--hf-config", str(hf), "--dtype", "bfloat16", "--json"]
    assert run(words) == 0
    oracle.assert_same(oracle.model(out), llama(torch.bfloat16))
    assert "21 tensors are cast from float32 to bfloat16" in json.loads(capsys.readouterr().out)["notes"]


def test_a_tied_head_is_left_out_if_it_is_the_embedding_and_refused_if_not(tmp_path, capsys):
    hf = reference(tmp_path / "hf", tie_word_embeddings=True)
    truth = llama()
    truth["lm_head.weight"] = truth["model.embed_tokens.weight"]
    source = saved(tmp_path / "tied", {"model": truth})
    assert run(["export-hf", str(source), str(tmp_path / "out"), "--hf-config", str(hf)]) == 0
    oracle.assert_same(
        oracle.model(tmp_path / "out"), {name: t for name, t in truth.items() if name != "lm_head.weight"}
    )
    source = saved(tmp_path / "apart", {"model": llama()})
    assert run(["export-hf", str(source), str(tmp_path / "none"), "--hf-config", str(hf)]) == 5
    assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def renamed(model: Tensors) -> Tensors:
    return {
        name.replace("embed_tokens", "tok_embeddings").removeprefix("model."): t for name, t in model.items()
    }


def lacking(model: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in model.items() if key != name}


REFUSED: dict[str, tuple[Callable[[Tensors], dict[str, Any]], list[str], int, str]] = {
    "missing": (lambda m: lacking(m, "lm_head.weight"), [], 5, "lm_head.weight [24, 8] is missing"),
    "extra": (lambda m: m | {"score.weight": torch.ones(2, 8)}, [], 5, "knows of no score.weight"),
    "value head": (lambda m: {f"lm.{k}": t for k, t in m.items()} | {"v_head.weight": torch.ones(1, 8)}, [], 5,
                   "v_head.weight: config.json knows of no such tensor"),
    "shape": (lambda m: m | {"model.norm.weight": torch.ones(9)}, [], 5, "is [9]; config.json asks for [8]"),
    "twice": (lambda m: {"actor": m, "ref": {k: t + 1 for k, t in m.items()}}, [], 5, "holds the model 2 times"),
    "one name": (lambda m: m | {"_orig_mod.model.norm.weight": torch.ones(8)}, [], 5, "one name without"),
    "other names": (lambda m: {"model": {f"x.{n}": t for n, t in enumerate(m.values())}}, [], 5, "it has 0 by name"),
    "padded": (lambda m: m, ["--vocab-size", "20"], 2, "no meaning for a checkpoint with Hugging Face names"),
    "type": (lambda m: m, ["--dtype", "int8"], 2, "--dtype int8"),
    "no config.json": (lambda m: m, ["--hf-config", "."], 3, "no config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exactly_the_model_is_refused(case, tmp_path, capsys):
    state, words, code, said = REFUSED[case]
    source = saved(tmp_path / "dcp", state(llama()))
    hf = [] if "--hf-config" in words else ["--hf-config", str(reference(tmp_path / "hf"))]
    words = [str(tmp_path) if word == "." else word for word in words]
    assert run(["export-hf", str(source), str(tmp_path / "out"), *hf, *words]) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_one_of_two_models_is_taken_when_the_other_is_left_out(tmp_path):
    models = {"actor": llama(), "ref": {name: tensor + 1 for name, tensor in llama().items()}}
    source, hf, out = saved(tmp_path / "dcp", models), reference(tmp_path / "hf"), tmp_path / "out"
    words = ["export-hf", str(source), str(out), "--hf-config", str(hf), "--ignore-keys", "ref.*"]
    assert run(words) == 0
    oracle.assert_same(oracle.model(out), models["actor"])


def test_without_a_config_the_way_to_give_one_is_said(tmp_path, capsys):
    source = saved(tmp_path / "dcp", {"model": llama()})
    assert run(["export-hf", str(source), str(tmp_path / "out")]) == 3
    assert "export-hf SRC HF --hf-config MODEL" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words", [["convert", "--to", "torch_dist"], ["export-hf"], ["export-hf", "--hf-config", "."]]
)
def test_a_map_of_parameter_groups_is_named_with_what_makes_use_of_it(words, tmp_path, capsys):
    keys = ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc2.weight")
    source = saved(tmp_path / "map", {f"module.module.{key}": 0 for key in keys})
    hf = reference(tmp_path / "hf")
    command, *rest = [str(hf) if word == "." else word for word in words]
    assert run([command, str(source), str(tmp_path / "out"), *rest]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "the parameter group of each of 2 parameters" in said and "build-param-group-map MAP -o FILE" in said
    )
    assert run(["build-param-group-map", str(source)]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {f"model.module.{key}" for key in keys}


@pytest.mark.parametrize("kind", ["titan", "app", "numbered"])
def test_an_architecture_without_rules_goes_by_weights_beside_its_config(kind, sharded, tmp_path, capsys):
    """Saved by two processes under `fully_shard`, with rows that they do not share evenly."""
    truth = torch.load(sharded / "truth.pt", weights_only=True)
    truth = {
        name: tensor for name, tensor in truth.items() if not name.startswith(("state.", "param_groups."))
    }
    hf, out = reference(tmp_path / "hf", model_type="unheard_of"), tmp_path / "out"
    words = ["export-hf", str(sharded / kind), str(out), "--hf-config", str(hf)]
    assert run(words) == 5
    assert "names and shapes of the model are not known" in " ".join(capsys.readouterr().err.split())
    save_file({name: torch.zeros_like(tensor) for name, tensor in truth.items()}, hf / "model.safetensors")
    assert run(words) == 0
    oracle.assert_same(oracle.model(out), truth)
    (hf / "model.safetensors").unlink()
    save_file({name: t for name, t in truth.items() if name != "frozen"}, hf / "model.safetensors")
    assert run([*words, "--overwrite"]) == 5
    assert "the weights next to config.json knows of no frozen" in " ".join(capsys.readouterr().err.split())
