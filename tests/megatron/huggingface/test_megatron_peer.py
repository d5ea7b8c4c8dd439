"""The layouts against the real megatron-core: one set of weights, a GPTModel and a transformers model, equal logits.

This is the test that a mistake made in both directions of a rule cannot pass.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tools.commands.huggingface.import_hf import ImportOptions, import_hf
from ckpt_tools.megatron.huggingface.config.megatron_args import read_model_args
from ckpt_tools.megatron.huggingface.mapping.rules import expand
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets
from tests.conftest import REPO
from tests.megatron.huggingface.by_rules import materialise, specs
from tests.megatron.huggingface.models import PLUS_ONE, SCRIPTED, compared_with_megatron, logits
from tests.megatron.huggingface.test_families import Case, load, make_case

PEERS = Path(os.environ.get("CKPT_TOOLS_PEERS", ""))
MCORE, EINOPS = PEERS / "megatron_core-0.16.1", PEERS / "einops-0.8.2"
RAN = compared_with_megatron()
WRONG = {
    "naive_qkv": "llama3",
    "naive_qkvz": "qwen3_next",
    "swapped_gate_up": "llama3",
    "other_rotation": "glm_moe_dsa",
}
# As checkpoints; norms of 1 + weight need a layer spec that asks for a GPU.
LOADED = [name for name in RAN if not name.startswith((*PLUS_ONE, "nemotron_bias")) and name != "nemotron"]
INTERLEAVED = [
    "llama3",
    "glm",
    "gpt_neox_tanh",
    "starcoder2",
]  # whole heads and parts, in each layout of q, k, v
HYBRIDS = ("nemotron_h", "mamba2")  # named as Transformer Engine's modules whatever the layer spec is

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings(SCRIPTED),
    pytest.mark.skipif(not MCORE.is_dir(), reason="CKPT_TOOLS_PEERS has no megatron_core-0.16.1"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Case], Path]:
    """Every family's case, and the folder with what megatron-core made of its parameters."""
    folder, originals = tmp_path_factory.mktemp("megatron"), tmp_path_factory.mktemp("originals")
    cases = {name: make_case(name, originals / name) for name in RAN}
    for name in LOADED:
        options = ImportOptions(
            layer_spec=None if name.startswith(HYBRIDS) else "local",
            vocab_size_padded=cases[name].imported.args["padded_vocab_size"],
        )
        import_hf(str(originals / name), str(folder / name), options)
    wrong = cases["llama3"]
    inputs = {name: (case.megatron, case.imported.args) for name, case in cases.items()}
    inputs["naive_qkv"] = ({**wrong.megatron, **naive_qkv(wrong)}, wrong.imported.args)
    for name in INTERLEAVED:
        in_pairs = {**cases[name].imported.args, "rotary_interleaved": True}
        inputs[f"{name}_in_pairs"] = (cases[name].megatron, in_pairs)
    if sparse := cases.get("glm_moe_dsa"):
        other = {"dsa_indexer_rope_interleaved": False}
        inputs["other_rotation"] = (sparse.megatron, {**sparse.imported.args, **other})
    if net := cases.get("qwen3_next"):
        inputs["naive_qkvz"] = ({**net.megatron, **naive_qkvz(net)}, net.imported.args)
    inputs["swapped_gate_up"] = ({**wrong.megatron, **swapped_gate_up(wrong)}, wrong.imported.args)
    for name, (parameters, args) in inputs.items():
        np.savez(folder / f"{name}.npz", **parameters)  # type: ignore[arg-type]
        (folder / f"{name}.json").write_text(json.dumps(dict(args)))
    words = "-W ignore -m tests.megatron.huggingface.megatron_logits"
    env = {**os.environ, "PYTHONPATH": f"{MCORE}:{EINOPS}"}
    done = subprocess.run(
        [sys.executable, *words.split(), str(folder)],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return cases, folder


def naive_qkv(case: Case) -> dict[str, Any]:
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    return {name: np.concatenate([case.tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"])}


def naive_qkvz(case: Case) -> dict[str, Any]:
    """The parts of a gated delta net cut as if they stood one after another."""
    name = "decoder.layers.1.self_attention.in_proj.weight."
    parts = [name + part for part in ("query", "key", "value", "z")]
    rows = np.cumsum([case.megatron[part].shape[0] for part in parts])[:-1]
    whole = case.tensors["model.layers.1.linear_attn.in_proj_qkvz.weight"]
    return dict(zip(parts, np.split(whole, rows), strict=True))


def swapped_gate_up(case: Case) -> dict[str, Any]:
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    return {name: np.concatenate(np.split(case.megatron[name], 2)[::-1])}


def difference(folder: Path, name: str, case: Case) -> float:
    """Largest difference of the two models' logits, padding rows of the vocabulary left out."""
    ours = np.load(folder / f"{name}.out.npz")["logits"][..., : case.want.shape[-1]]
    return float(np.abs(ours - case.want.numpy()).max())


@pytest.mark.parametrize("name", RAN)
def test_equal_logits(name, runs):
    cases, folder = runs
    recurrent = any(".in_proj." in key for key in cases[name].megatron)  # sums over all tokens before
    assert difference(folder, name, cases[name]) < (5e-5 if recurrent else 1e-5)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_rotary_pairs_in_neighbouring_rows(name, runs, tmp_path):
    """The same parameters under `rotary_interleaved` are another model, which the exported one is."""
    cases, folder = runs
    args = {**cases[name].imported.args, "rotary_interleaved": True}
    exported = export_targets(specs(cases[name].megatron), args, cases[name].config)
    tensors = materialise(exported.tensors, cases[name].megatron, target_shapes=exported.shapes)
    case = replace(cases[name], want=logits(load(tmp_path / "exported", tensors, dict(exported.config))))
    assert difference(folder, f"{name}_in_pairs", case) < 1e-5
    assert difference(folder, f"{name}_in_pairs", cases[name]) > 1e-2


@pytest.mark.parametrize("name", [name for name, right in WRONG.items() if right in RAN])
def test_wrong_layouts_are_seen(name, runs):
    cases, folder = runs
    assert difference(folder, name, cases[WRONG[name]]) > 1e-2


@pytest.mark.parametrize("name", RAN)
def test_keys_are_those_megatron_writes(name, runs):
    """The model's own `sharded_state_dict` has one key for every rule, and no other."""
    cases, folder = runs
    written = set(np.load(folder / f"{name}.out.npz")["keys"])
    case = cases[name]
    pairs = expand(case.exported.family, read_model_args(case.imported.args))
    for pair in pairs:
        names = [one for core in pair.core for one in (core, *pair.also)]
        spellings = {*map(stacked, names), *(re.sub(r"(?<=experts\.)\d+\.", "", one) for one in names)}
        assert spellings & written, (pair.core, sorted(written))
    known = {stacked(one) for pair in pairs for core in pair.core for one in (core, *pair.also)}
    assert {stacked(key) for key in written} <= known


def stacked(name: str) -> str:
    """The name without layer and expert numbers."""
    return re.sub(r"(?<=layers\.)\d+\.|(?<=experts\.)\d+\.", "", name)
