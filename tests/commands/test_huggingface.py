"""`export-hf` and `import-hf` end to end: real checkpoints against their truth, every family there and back."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from ckpt_tools import CkptError, ExportOptions, ImportOptions, TargetOptions, export_hf, import_hf
from ckpt_tools.cli.app import run
from ckpt_tools.errors import MappingError, UsageError
from tests.commands import oracle
from tests.commands.made import fsdp, hf
from tests.conftest import REPO, RUN, fixture_dir
from tests.folders import content
from tests.megatron.huggingface.by_rules import DEEPSEEK, LLAMA, QWEN3_MOE, directory

GPT_OSS = {
    **LLAMA, "model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"], "rope_scaling": {"rope_type": "default"},
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 9, "vocab_size": 11,
        "layer_norm_epsilon": 1e-5, "torch_dtype": "float32"}  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_dense_first": {**QWEN3_MOE, "mlp_only_layers": [0]},
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "gpt2": GPT2,
    "gemma": {**LLAMA, "model_type": "gemma", "tie_word_embeddings": True},
    "falcon_h1": {
        **LLAMA,
        "model_type": "falcon_h1",
        "rope_theta": 1e11,
        "mamba_n_heads": 6,
        "mamba_d_head": 4,
        "mamba_d_ssm": 24,
        "mamba_d_state": 5,
        "mamba_n_groups": 2,
        "key_multiplier": 0.39,
    },
}


def model(name: str, folder: Path) -> dict[str, Any]:
    """A random Hugging Face directory of a family; its tensors."""
    folder.mkdir()
    tensors = dict(directory(CONFIGS[name]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return tensors


@pytest.mark.parametrize("to", ["torch_dist", "fsdp_dtensor"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_there_and_back(name, to, tmp_path):
    """Imported, exported again in shards of 2 kB: every tensor bit for bit, config fields as they were."""
    tensors = model(name, tmp_path / "hf")
    rates = (
        TargetOptions(lr=1e-5, min_lr=1e-6, weight_decay=0.1, tp=1)
        if to == "fsdp_dtensor"
        else TargetOptions()
    )
    import_hf(tmp_path / "hf", tmp_path / "run", ImportOptions(to=to, fsdp=rates))
    latest = (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text()
    assert latest == ("release" if to == "torch_dist" else "1")
    folder = tmp_path / "run" / ("release" if to == "torch_dist" else "iter_0000001")
    assert (folder / "metadata.json").exists() == (to == "torch_dist")
    report = export_hf(tmp_path / "run", tmp_path / "out", ExportOptions(max_shard_bytes=2000))
    oracle.assert_same(oracle.model(tmp_path / "out"), oracle.model(tmp_path / "hf"))
    assert report.tensors == len(tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for key, value in CONFIGS[name].items():
        assert config[key] == value, key
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    for file in shards:
        data = sum(tensors[k].nbytes for k, f in index["weight_map"].items() if f == file)
        assert data <= 2000 or list(index["weight_map"].values()).count(file) == 1


@pytest.mark.parametrize(
    "name",
    ["v011_dense_ms_tp2_dp1", "v013_dense_dpzero_tp2_dp2", "v014_dense_ms_tp2_dp2_te", "v016_dense_dpr_tp2_dp2",
     "v016_dense_weightsonly_tp2", "main_dense_dpr_pp2_vpp2_tied", "bridge_dense_fr_tp2_dp2"],
)  # fmt: skip
def test_real_checkpoints_against_their_truth(name):
    """q, k, v, gate and up cut from the unsharded truth by hand; vocabulary rows; every name accounted for."""
    found, stored = oracle.model(hf(name)), load_file(fixture_dir(name) / "truth.safetensors")
    truth = {key.removeprefix("model/"): tensor for key, tensor in stored.items() if key.startswith("model/")}
    config = json.loads((hf(name) / "config.json").read_text())
    heads, groups, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    rows = config["vocab_size"]
    expected = {"model.embed_tokens.weight": truth["embedding.word_embeddings.weight"][:rows]}
    if not config["tie_word_embeddings"]:
        expected["lm_head.weight"] = truth["output_layer.weight"][:rows]
    for layer in range(config["num_hidden_layers"]):
        core, name_of = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for leaf in ("weight", "bias"):
            qkv = truth.get(f"{core}self_attention.linear_qkv.{leaf}")
            if qkv is None:
                continue
            blocks = qkv.reshape(groups, heads // groups + 2, dim, *qkv.shape[1:])
            for x, part in zip("qkv", (blocks[:, :-2], blocks[:, -2], blocks[:, -1]), strict=True):
                expected[f"{name_of}self_attn.{x}_proj.{leaf}"] = part.reshape(-1, *qkv.shape[1:])
            gate, up = truth[f"{core}mlp.linear_fc1.{leaf}"].chunk(2)
            expected |= {f"{name_of}mlp.gate_proj.{leaf}": gate, f"{name_of}mlp.up_proj.{leaf}": up}
            expected[f"{name_of}self_attn.o_proj.{leaf}"] = truth[f"{core}self_attention.linear_proj.{leaf}"]
            expected[f"{name_of}mlp.down_proj.{leaf}"] = truth[f"{core}mlp.linear_fc2.{leaf}"]
    oracle.assert_same({k: t for k, t in found.items() if "norm" not in k}, expected)
    assert {k for k in found if "norm" in k} == {"model.norm.weight"} | {
        f"model.layers.{i}.{n}_layernorm.weight"
        for i in range(config["num_hidden_layers"])
        for n in ("input", "post_attention")
    }


@pytest.mark.parametrize(
    "name", ["core019_llama_tp2_fully_reshardable", "core019_gpt3_tp2_native_fsdp_dtensor"]
)
def test_transformers_loads_what_real_training_wrote(name):
    transformers = pytest.importorskip(
        "transformers", reason="the optional peer transformers is not installed"
    )
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(hf(name), output_loading_info=True)
    assert not any(info.values()), info
    for key, tensor in oracle.model(hf(name)).items():
        assert oracle.same_bytes(loaded.get_parameter(key).detach().bfloat16(), tensor), key


def test_both_formats_of_one_run_export_the_same_model():
    """The torch_dist checkpoint, and the fsdp_dtensor one converted from it: equal files to the last byte."""
    assert content(hf(fsdp(RUN.name))) == content(hf(RUN.name))


def test_two_processes_write_the_same_bytes(tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ckpt_tools",
               "export-hf", str(RUN), str(tmp_path / "two"), "--max-shard-size", "20KB", "-q"]  # fmt: skip
    done = subprocess.run([sys.executable, *command], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one = content(hf(RUN.name, max_shard_bytes=20_000))
    assert one == content(tmp_path / "two") and len(one) > 4


def test_norms_are_shifted_once_in_float32_and_the_loss_is_told(tmp_path):
    """A Gemma whose Megatron stores 1 + w in bfloat16: HF gets (1 + w) - 1, rounded once."""
    tensors = model("gemma", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run", ImportOptions(dtype="bfloat16"))
    common = tmp_path / "run" / "release" / "common.pt"
    state = torch.load(common, weights_only=False)
    state["args"].layernorm_zero_centered_gamma = state["args"].apply_layernorm_1p = False
    torch.save(state, common)
    report = export_hf(tmp_path / "run", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for key, array in tensors.items():
        want = torch.from_numpy(array).bfloat16()
        if "norm" in key:
            want = (want.float() - 1).bfloat16()
        assert torch.equal(found[key].view(torch.uint16), want.view(torch.uint16)), key
    assert any("-1 was added to 5 norms in float32" in note and "lost bits" in note for note in report.notes)


def test_assets_and_reference(tmp_path):
    """--hf-config: tokenizer files byte for byte, its other config fields kept; weights and code are not copied."""
    model("llama", tmp_path / "hf")
    for name in (
        "tokenizer.json",
        "merges.txt",
        "generation_config.json",
        "modeling_x.py",
        "pytorch_model.bin",
    ):
        (tmp_path / "hf" / name).write_text(name)
    config = {**LLAMA, "bos_token_id": 7, "max_position_embeddings": 99}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    import_hf(tmp_path / "hf", tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "out", ExportOptions(hf_config=str(tmp_path / "hf")))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "merges.txt",
        "generation_config.json",
    }
    assert (tmp_path / "out" / "merges.txt").read_text() == "merges.txt"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] == 7


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_folder_in_the_place_of_a_file_is_named(name, tmp_path):
    model("llama", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run")
    (tmp_path / "hf" / name).unlink(missing_ok=True)
    (tmp_path / "hf" / name).mkdir()
    with pytest.raises(
        CkptError, match=f"{name} is a folder, where a file is expected. Move it away"
    ) as caught:
        export_hf(tmp_path / "run", tmp_path / "out", ExportOptions(hf_config=str(tmp_path / "hf")))
    assert caught.value.exit_code in (3, 4) and not (tmp_path / "out").exists()


def test_a_tied_head_must_be_the_embedding(tmp_path):
    tensors = model("gemma", tmp_path / "hf")
    embedding = tensors["model.embed_tokens.weight"]
    for changed in (False, True):
        head = embedding.copy()
        head[7, 3] += changed
        save_file({**tensors, "lm_head.weight": head}, tmp_path / "hf" / "model.safetensors")
        run_dir = tmp_path / f"run{changed}"
        if not changed:
            import_hf(tmp_path / "hf", run_dir)
            continue
        with pytest.raises(MappingError, match=r"lm_head.weight differs from model.embed_tokens.weight at"):
            import_hf(tmp_path / "hf", run_dir)
        assert not run_dir.exists()


def test_nothing_is_written_when_something_is_wrong(tmp_path):
    tensors = model("qwen3_moe", tmp_path / "hf")
    del tensors["model.layers.0.mlp.experts.1.down_proj.weight"]
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(MappingError, match=r"experts.1.down_proj.weight \[12, 6\] is missing"):
        import_hf(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    source = fixture_dir("core019_moe_ep2_fully_reshardable")  # GLM-4.5 but for its small shared expert
    with pytest.raises(
        MappingError, match="a shared expert of 24 is not a multiple of the experts' 48"
    ) as caught:
        export_hf(source, tmp_path / "out")
    assert str(caught.value).startswith(
        "config.json of a Glm4MoeForCausalLM cannot say it:\n"
        "  - n_shared_experts, for moe_shared_expert_intermediate_size 24: "
    )
    assert not (tmp_path / "out").exists()


def test_a_shared_expert_of_a_size_of_its_own(tmp_path):
    """As the refusal says it: a rule file names the field of a class that has one, and the model comes back."""
    source = fixture_dir("core019_moe_ep2_fully_reshardable")
    size = "shared_expert_intermediate_size: moe_shared_expert_intermediate_size"
    rules = tmp_path / "mine.yaml"
    rules.write_text(
        "{family: mine, architecture: MineForCausalLM, model_type: mine, like: glm4_moe, "
        f"fields: {{n_shared_experts: null, {size}}}}}"
    )
    export_hf(source, tmp_path / "hf", ExportOptions(rules=rules, dtype="float32"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["shared_expert_intermediate_size"] == 24 and "n_shared_experts" not in config
    import_hf(tmp_path / "hf", tmp_path / "run", ImportOptions(rules=rules))
    export_hf(tmp_path / "run", tmp_path / "again", ExportOptions(rules=rules, dtype="float32"))
    oracle.assert_same(oracle.model(tmp_path / "again"), oracle.model(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("options", "error"),
    [(ExportOptions(dtype="int8"), UsageError), (ExportOptions(vocab_size=10**6), MappingError),
     (ExportOptions(hf_config="nowhere"), CkptError)],
)  # fmt: skip
def test_impossible_options(options, error, tmp_path):
    with pytest.raises(error):
        export_hf(RUN, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_convert_to_hf_is_export_hf(tmp_path):
    """The same bytes, and the same report but for the place and what was measured."""
    source, reports = str(RUN), []
    for words in (["export-hf", source, "a"], ["convert", source, "b", "--to", "hf"]):
        words[2], file = str(tmp_path / words[2]), tmp_path / "report.json"
        assert (
            run([*words, "--dtype", "float32", "--max-shard-size", "60KB", "-q", "--report", str(file)]) == 0
        )
        report = json.loads(file.read_bytes())
        for measured in ("seconds", "peak_rss_bytes", "directory"):
            del report["written"][measured]
        del report["output"]
        reports.append(report)
    assert reports[0] == reports[1]
    made = [content(tmp_path / name) for name in ("a", "b")]
    assert made[0] == made[1] and "model.safetensors.index.json" in made[0]
