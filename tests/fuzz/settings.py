"""Parsers of settings, to be fuzzed: config.json, arguments, rule files, journals, a job's YAML and flags."""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from ckpt_tools.errors import CkptError, MappingError
from ckpt_tools.execute.output.folders import Folder
from ckpt_tools.execute.output.journal import Journal
from ckpt_tools.formats.untrusted_documents import parse_json
from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, load_rule_file
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.rules import expand
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets, import_targets
from ckpt_tools.model.transfers import Plan
from ckpt_tools.verify.readiness.job import parse_command, parse_yaml

Settings = Mapping[str, Any]
BASE = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 10, "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6, "torch_dtype": "float32"}  # fmt: skip
CONFIGS: tuple[Settings, ...] = (
    {**BASE, "model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {**BASE, "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
     "norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    {**BASE, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 8,
     "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "n_routed_experts": 3, "n_group": 1,
     "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 1, "first_k_dense_replace": 1,
     "num_nextn_predict_layers": 1, "topk_group": 1, "head_dim": 2},
)  # fmt: skip
RULES: tuple[Settings, ...] = (
    {"family": "mine", "architecture": "MineForCausalLM", "like": "llama", "ignored": [r"model\.note"],
     "rules": [{"core": "decoder.layers.{l}.mlp.linear_fc1.weight", "hf": "model.{l}.up_and_gate.weight",
                "layout": "same", "shape": ["fc1", "hidden"], "when": ["dense"]}]},
    {"family": "other", "like": "qwen3_moe", "without": ["output_layer.weight"], "fixed": {"hidden_act": "silu"},
     "needs": {"add_qkv_bias": False}, "plus_one": [],
     "rules": [{"core": "decoder.layers.{l}.mlp.experts.linear_fc1.weight{e}", "layout": "gate_up",
                "hf": ["model.layers.{l}.mlp.experts.{e}.gate_proj.weight",
                       "model.layers.{l}.mlp.experts.{e}.up_proj.weight"], "shape": ["moe_fc1", "hidden"]}]},
)  # fmt: skip
JOBS = (
    b"MODEL_ARGS:\n  --num-layers: 2\n  --use-megatron-fsdp: true\n  a: &a [1, 2]\n  b: *a\nENV_VARS:\n  A: 1\n",
    b"model: {num_layers: 2}\ncheckpoint: {load: x}\nddp: {use_megatron_fsdp: true}\n",
    b"A=1 python x.py --num-layers 2 --use-megatron-fsdp --no-x=1 --a b c -- d\n",
)


class Model(NamedTuple):
    """A model's tensors on either side, by name."""

    theirs: Mapping[str, Spec]
    ours: Mapping[str, Spec]
    args: Settings


@cache
def models() -> dict[str, Model]:
    """By the `model_type` of the config that describes it."""
    found = {}
    for config in CONFIGS:
        family = family_of_config(config)
        pairs = expand(family, read_config(family, {**config, "padded_vocab_size": 11}))
        theirs = {
            key: Spec("float32", tuple(config["vocab_size"] if n == 0 else n for n in shape.shape))
            for pair in pairs
            for key, shape in zip(pair.hf, pair.tensors, strict=True)
        }
        imported = import_targets(theirs, config, vocab_multiple=1)
        ours = {tensor.key: Spec(tensor.dtype, tensor.shape) for tensor in imported.tensors}
        found[str(config["model_type"])] = Model(theirs, ours, imported.args)
    return found


def config(data: bytes) -> None:
    """A config.json that describes weights, or that an export refers to."""
    found = parse_json(data)
    if not isinstance(found, dict):
        raise MappingError("not an object")
    model = models().get(str(found.get("model_type")), models()["llama"])
    for args in (model.args, None):
        with suppress(CkptError):
            export_targets(model.ours, args, found)
    import_targets(model.theirs, found)


def arguments(data: bytes) -> None:
    """Megatron's arguments of a checkpoint that is exported."""
    found = parse_json(data)
    if not isinstance(found, dict):
        raise MappingError("not an object")
    model = max(models().values(), key=lambda one: sum(found.get(k) == v for k, v in one.args.items()))
    export_targets(model.ours, found)


def rules(data: bytes) -> None:
    """A rule file, and the family that it makes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rules.yaml")
        path.write_bytes(data)
        family = load_rule_file(path)
    families = {**FAMILIES, family.name: family}
    for one, model in zip(CONFIGS, models().values(), strict=True):
        changed = {**one, "model_type": family.model_type or family.name}
        with suppress(CkptError):
            import_targets(model.theirs, changed, families=families)
        with suppress(CkptError):
            export_targets(model.ours, model.args, changed, families=families)


def journal(data: bytes) -> None:
    """What a stopped conversion left: the header up to the first line end, then the lines of items."""
    header, _, lines = data.partition(b"\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        path.mkdir()
        (path / "plan.json").write_bytes(header)
        (path / "0.jsonl").write_bytes(lines)
        kept = Journal(path, lambda: Folder.named(path.parent))
        done = kept.finished()
        assert all(number >= 0 and checksum >= 0 for number, checksum in done.items())
        plan = cast(Plan, _Digest("x"))
        kept.resume(plan, [["a", 1, 2], ["b", 3, 4]], "here")


class _Digest(NamedTuple):
    digest: str


def job(data: bytes) -> None:
    """A job's settings: as flags, and as YAML."""
    with suppress(CkptError):
        parse_command(data.decode("utf-8", "surrogateescape").split())
    parse_yaml(data)


PARSERS: dict[str, Callable[[bytes], None]] = {
    "config": config,
    "arguments": arguments,
    "rules": rules,
    "journal": journal,
    "job": job,
}


def seeds(parser: str) -> Iterable[bytes]:
    """Inputs to start from."""
    if parser == "config":
        yield from (json.dumps(one).encode() for one in CONFIGS)
    elif parser == "arguments":
        yield from (json.dumps(dict(one.args)).encode() for one in models().values())
    elif parser == "rules":
        yield from (json.dumps(one).encode() for one in RULES)
        yield b"family: x\nlike: llama\nrules:\n  - {core: 'a.{l}', hf: &h 'b.{l}', shape: [hidden]}\nignored: [*h]\n"
    elif parser == "journal":
        yield b'{"digest": "x", "source": [["a", 1, 2], ["b", 3, 4]]}\n[0,7]\n[12,4294967295]\n[3,'
    else:
        yield from JOBS
