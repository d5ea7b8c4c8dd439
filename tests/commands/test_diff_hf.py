"""`diff` of models under other names: Hugging Face by the rules of export, state dicts inside of wrappers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools.cli.app import run
from tests.commands.test_plain_to_hf import Tensors, llama, reference, saved, wrapped
from tests.conftest import LLAMA, fixture_dir
from tests.damage import ITERATION, copy_of, flip_bit, payload_of
from tests.megatron.huggingface.by_rules import QWEN3_MOE, directory


def diff(a, b, capsys, *flags):
    """(exit code, report) of a comparison."""
    capsys.readouterr()
    code = run(["diff", str(a), str(b), "-q", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def export(name, folder):
    assert run(["export-hf", str(fixture_dir(name)), str(folder), "-q"]) == 0
    return folder


IMPORTED = ("hf_qwen3", "moonlight_inv_freq/hf", "n_group_1_reference/hf", "n_group_1_reference/hf_v2lite",
            "enable_gpt_oss/hf", "mixed_dtype_rounded/hf", "mistral_consolidated/hf")  # fmt: skip
ROUNDED = (
    "mixed_dtype_rounded/hf",
    "fsdp_dtensor",
)  # a fresh optimizer's masters are in the place of fp32 weights


@pytest.mark.parametrize(
    ("case", "to"),
    [(case, to) for case in IMPORTED for to in ("torch_dist", "fsdp_dtensor") if (case, to) != ROUNDED],
)
def test_an_import_equals_its_source(case, to, cases, tmp_path, capsys):
    rates = ["--lr", "1e-5", "--min-lr", "1e-6", "--weight-decay", "0.1"] if to == "fsdp_dtensor" else []
    assert run(["import-hf", str(cases / case), str(tmp_path / "out"), "-q", "--to", to, *rates]) == 0
    for pair in ((cases / case, tmp_path / "out"), (tmp_path / "out", cases / case)):
        code, report = diff(*pair, capsys, "--ignore", "*e_score_correction_bias")
        assert (code, report["by"], report["equal"]) == (0, "huggingface", True)
        assert len(report["tensors"]) > 20
        assert any("as export-hf would write them" in note for note in report["notes"])
    left_out = [note for note in report["notes"] if "rotary frequencies" in note]
    assert len(left_out) == (3 if "inv_freq" in case else 0)


@pytest.mark.parametrize("to", [None, "fsdp_dtensor"])
def test_an_export_equals_its_source(to, tmp_path, capsys):
    source = fixture_dir(LLAMA)
    if to:
        assert run(["convert", str(source), str(tmp_path / "run"), "--to", to, "-q"]) == 0
        source = tmp_path / "run"
    code, report = diff(source, export(LLAMA, tmp_path / "hf"), capsys)
    assert (code, report["by"], report["equal"]) == (0, "huggingface", True)
    assert len(report["tensors"]) > 15


def test_models_that_cannot_be_the_same_are_refused(cases, capsys):
    assert run(["diff", str(fixture_dir(LLAMA)), str(cases / "moonlight_inv_freq" / "hf")]) == 5
    plain = str(cases / "mixed_dtype_rounded" / "hf")
    assert run(["diff", plain, plain, "--by", "parameters"]) == 2
    assert "--by parameters" in capsys.readouterr().err
    assert diff(plain, plain, capsys)[1]["by"] == "keys"


def save(folder, config, tensors):
    folder.mkdir()
    tensors = {key: torch.tensor(value) for key, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def changed(folder, target, **changes):
    """A copy of a model whose tensors are others, or gone."""
    shutil.copytree(folder, target, copy_function=shutil.copyfile)
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def as_one_tensor(tensors):
    """The experts as transformers 5 holds them."""
    fused = {key: array for key, array in tensors.items() if ".experts." not in key}
    for layer in range(2):
        one = f"model.layers.{layer}.mlp.experts."
        up = [
            np.concatenate([tensors[f"{one}{e}.{k}_proj.weight"] for k in ("gate", "up")]) for e in range(3)
        ]
        fused[f"{one}gate_up_proj"] = np.stack(up)
        fused[f"{one}down_proj"] = np.stack([tensors[f"{one}{e}.down_proj.weight"] for e in range(3)])
    return fused


def test_experts_one_by_one_are_those_of_one_tensor(tmp_path, capsys):
    """And a tied head that one of the two stores nevertheless is no difference; names of the first are shown."""
    config = {**QWEN3_MOE, "tie_word_embeddings": True}
    tensors = dict(directory(config))
    save(tmp_path / "one", config, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    fused = as_one_tensor(tensors)
    save(tmp_path / "fused", config, fused)
    for pair in (("one", "fused"), ("fused", "one")):
        code, report = diff(*(tmp_path / name for name in pair), capsys)
        assert (code, report["by"], report["equal"]) == (0, "huggingface", True)
    assert len(report["tensors"]) == len(fused)
    fused["model.layers.1.mlp.experts.gate_up_proj"][2, 7, 3] += 1  # row 1 of the second half
    save(tmp_path / "changed", config, fused)
    code, report = diff(tmp_path / "one", tmp_path / "changed", capsys)
    (found,) = [one for one in report["tensors"] if one["kind"] != "equal"]
    assert (code, found["key"]) == (1, "model.layers.1.mlp.experts.2.up_proj.weight")
    del fused["model.norm.weight"]
    save(tmp_path / "less", config, fused)
    for pair in (("one", "less"), ("less", "one")):
        assert diff(*(tmp_path / name for name in pair), capsys)[0] == 1


@pytest.mark.parametrize("words", [[], ["--headers"]], ids=["content", "headers"])
@pytest.mark.parametrize("other", [np.float16, np.float32, np.float64])
def test_two_models_of_other_types_differ_both_ways(words, other, tmp_path, capsys):
    """In any form: that a checkpoint's weights are rounded as they are exported is no rule of two models."""
    tensors = dict(directory(QWEN3_MOE))
    fused = {key: value.astype(other) for key, value in as_one_tensor(tensors).items()}
    again = other if other != np.float32 else np.float16
    save(tmp_path / "fused", QWEN3_MOE, fused)
    save(tmp_path / "one", QWEN3_MOE, {key: value.astype(again) for key, value in tensors.items()})
    save(tmp_path / "half", QWEN3_MOE, {key: value.astype(np.float32) for key, value in tensors.items()})
    is_same = again == other
    for pair, equal in (("one", "fused"), is_same), (("half", "fused"), other == np.float32):
        for a, b in (pair, pair[::-1]):
            code, report = diff(tmp_path / a, tmp_path / b, capsys, *words)
            assert (code, report["equal"]) == (0 if equal else 1, equal), (a, b)
            assert not any("checkpoint" in note or "vocabulary" in note for note in report["notes"])


def test_a_tied_head_that_is_stored_nevertheless(cases, tmp_path, capsys):
    """It follows from the embedding, and is looked at: one changed element is a difference."""
    source, head = cases / "hf_qwen3", "lm_head.weight"
    tied = load_file(source / "model.safetensors")["model.embed_tokens.weight"].clone()
    model = changed(source, tmp_path / "model", **{head: tied})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert run(["import-hf", str(model), str(tmp_path / "out"), "-q", "--to", "torch_dist"]) == 0
    code, report = diff(model, tmp_path / "out", capsys)
    assert (code, report["equal"]) == (0, True)
    assert head not in {t["key"] for t in report["tensors"]}
    assert any(note.startswith(f"{head}: the same values as model.embed") for note in report["notes"])
    tied.view(torch.uint8)[0, 0] ^= 1
    code, report = diff(changed(model, tmp_path / "other", **{head: tied}), tmp_path / "out", capsys)
    assert code == 1
    assert [(t["key"], t["kind"]) for t in report["tensors"] if t["kind"] != "equal"] == [(head, "only in A")]


def test_one_bit_is_named_under_its_hugging_face_name(tmp_path, capsys):
    """In a part of a fused projection of one layer."""
    hf = export(LLAMA, tmp_path / "hf")
    root = copy_of(LLAMA, tmp_path)
    path, at, _ = payload_of(root, "decoder.layers.self_attention.linear_qkv.weight", (1, 0, 0))
    flip_bit(path, at)
    code, report = diff(root, hf, capsys)
    wrong = [t for t in report["tensors"] if t["kind"] != "equal"]
    assert (code, len(wrong), wrong[0]["kind"], wrong[0]["different"]) == (1, 1, "values", 1)
    assert wrong[0]["key"] == "model.layers.1.self_attn.q_proj.weight"
    assert wrong[0]["index"] == [0, 0]


def test_swapped_and_missing_tensors_of_the_model(tmp_path, capsys):
    hf, norm = export(LLAMA, tmp_path / "hf"), "model.norm.weight"
    tensors = load_file(hf / "model.safetensors")
    a, b = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
    swapped = changed(hf, tmp_path / "swapped", **{a: tensors[b], b: tensors[a]})
    code, report = diff(swapped, fixture_dir(LLAMA), capsys)
    assert code == 1
    assert {t["key"] for t in report["tensors"] if t["kind"] == "values"} == {a, b}
    renamed = changed(hf, tmp_path / "renamed", **{norm: None, "extra.weight": tensors[norm]})
    assert run(["diff", str(renamed), str(fixture_dir(LLAMA))]) in (1, 5)
    said = "".join(capsys.readouterr())
    assert "extra.weight" in said or norm in said


def test_fp32_masters_against_a_half_precision_model(cases, tmp_path, capsys):
    """The checkpoint's weights are rounded as export-hf rounds them; what is stored wider is compared as that."""
    source = cases / "hf_qwen3"
    assert run(["import-hf", str(source), str(tmp_path / "out"), "-q", "--dtype", "float32"]) == 0
    code, report = diff(source, tmp_path / "out", capsys)
    assert (code, report["equal"]) == (0, True)
    assert any("compared as the wider type" in note for note in report["notes"])
    (tmp_path / "out" / "release").rename(tmp_path / "out" / ITERATION)
    path, at, _ = payload_of(tmp_path / "out", "decoder.final_layernorm.weight", (0,))
    flip_bit(path, at)  # below what a bfloat16 can say
    code, report = diff(source, tmp_path / "out" / ITERATION, capsys)
    assert code == 1
    assert [t["key"] for t in report["tensors"] if t["kind"] != "equal"] == ["model.norm.weight"]


def test_a_model_without_its_config_is_compared_by_names(tmp_path, capsys):
    hf = export(LLAMA, tmp_path / "hf")
    (hf / "config.json").unlink()
    assert run(["diff", str(hf), str(fixture_dir(LLAMA))]) == 3
    code, report = diff(hf, fixture_dir(LLAMA), capsys, "--by", "keys")
    assert (code, report["by"], report["equal"]) == (1, "keys", False)


def test_names_of_export_need_a_model_and_a_checkpoint(tmp_path, capsys):
    hf = export(LLAMA, tmp_path / "hf")
    shutil.copytree(hf, tmp_path / "again")
    for pair in ((hf, tmp_path / "again"), (fixture_dir(LLAMA), fixture_dir(LLAMA))):
        assert run(["diff", *map(str, pair), "--by", "huggingface"]) == 2
        assert "--by huggingface" in capsys.readouterr().err
    assert diff(hf, tmp_path / "again", capsys)[0] == 0


@pytest.mark.parametrize("to", [None, "fsdp_dtensor", "dcp"])
def test_headers_say_what_is_carried_and_what_not(to, tmp_path, capsys):
    model, norm, head = export(LLAMA, tmp_path / "hf"), "model.norm.weight", "lm_head.weight"
    source = fixture_dir(LLAMA)
    if to is not None:
        source = tmp_path / "run"
        assert run(["convert", str(fixture_dir(LLAMA)), str(source), "--to", to, "--gpus", "2", "-q"]) == 0
    tensors = load_file(model / "model.safetensors")
    damaged = changed(model, tmp_path / "damaged", **{norm: tensors[norm] * 2})
    assert diff(damaged, source, capsys)[0] == 1
    for pair in ((damaged, source), (source, damaged)):
        code, report = diff(*pair, capsys, "--headers")
        assert (code, report["headers"], report["objects_compared"]) == (0, True, 0)
        assert {t["kind"] for t in report["tensors"]} == {"equal"} and len(report["tensors"]) == len(tensors)
        assert any("a Hugging Face model has no optimizer: " in note for note in report["notes"])
    for name, tensor, kind in (
        (norm, None, "only in B"),
        ("x", tensors[norm], "only in A"),
        (norm, tensors[norm][1:], "shape"),
        (head, tensors[head].half(), "dtype"),
    ):
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        code, report = diff(changed(model, tmp_path / "other", **{name: tensor}), source, capsys, "--headers")
        found = {t["key"]: t["kind"] for t in report["tensors"] if t["kind"] != "equal"}
        assert (code, found) == (1, {name: kind})


def test_headers_read_no_payload(tmp_path, capsys, monkeypatch):
    """Neither to prove that a head is the embedding, nor to compare."""
    monkeypatch.setattr("ckpt_tools.execute.move.read_box.BoxReader.__init__", None)
    model = fixture_dir(LLAMA)
    assert diff(model, model, capsys, "--headers")[0] == 0
    assert diff(fixture_dir("core019_moe_ep2_fully_reshardable"), model, capsys, "--headers")[0] == 1


Make = Callable[[Tensors], dict[str, Any]]
SAID = "are one model's"


def trained(model: Tensors) -> dict[str, Any]:
    """A model and its Adam, by name."""
    state = {name: {"exp_avg": weight + 1, "step": torch.tensor(3.0)} for name, weight in model.items()}
    groups = [{"params": list(model), "lr": 0.1}]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}


def in_front(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda model: {prefix + name: tensor for name, tensor in model.items()}


def differ(a: Path, b: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run(["diff", str(a), str(b), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


WRAPPED: dict[str, tuple[Make, Make, str]] = {
    "dict": (lambda m: m, lambda m: {"model": m}, "B behind 'model.' are compared with A's:"),
    "ddp": (lambda m: m, lambda m: {"app": {"model": in_front("module.")(m)}},
            "B behind 'app.model.module.' are compared with A's:"),
    "fsdp": (lambda m: m, in_front("_fsdp_wrapped_module."), "B are compared with A's, without the segments"),
    "compiled": (in_front("_fsdp_wrapped_module."), lambda m: {"net": wrapped(m)},
                 "A are compared with B's behind 'net.', without the segments"),
    "engine": (in_front("engine.module."), in_front("module."), "A behind 'engine.' are compared with B's:"),
    "trained": (trained, lambda m: trained(in_front("module.")(m)),
                "B behind 'model.module.' are compared with A's behind 'model.':"),
    "trained and compiled": (trained, lambda m: trained(wrapped(m)), "B are compared with A's, without"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRAPPED)
def test_a_prefix_is_seen_through_and_said(case, tmp_path, capsys):
    """In both orders; and a value that differs is found under the name that it has without the prefix."""
    *made, said = WRAPPED[case]
    other = llama()
    other["model.layers.1.mlp.up_proj.weight"][3, 2] += 1
    a, b = (saved(tmp_path / n, make(llama())) for n, make in zip("ab", made, strict=True))
    changed = saved(tmp_path / "changed", made[1](other))
    code, report = differ(a, b, capsys)
    assert code == 0 and not report["values"]
    assert len(report["notes"]) == 1 and said in report["notes"][0], report["notes"]
    assert differ(b, a, capsys)[0] == 0
    code, report = differ(a, changed, capsys)
    found = [one["key"] for one in report["tensors"] if one["kind"] != "equal"]
    assert code == 1 and found and all("layers.1" in name and "up_proj" in name for name in found)
    assert differ(a, b, capsys, "--by", "keys")[0] == 1


def test_a_hugging_face_folder_is_compared_with_a_wrapped_model(tmp_path, capsys):
    hf = reference(tmp_path / "hf")
    save_file(llama(), hf / "model.safetensors")
    code, report = differ(hf, saved(tmp_path / "dcp", {"model": wrapped(llama())}), capsys)
    assert code == 0 and [one["kind"] for one in report["tensors"]] == ["equal"] * len(llama())


def _without_head(model: Tensors) -> Tensors:
    return {name: tensor for name, tensor in model.items() if name != "lm_head.weight"}


HEAD = {"lm_head.weight": torch.zeros(24, 8)}
UNPROVEN: dict[str, tuple[Make, Make]] = {
    "two prefixes": (in_front("actor."), in_front("critic.")),
    "another shape": (lambda m: m, lambda m: in_front("module.")(m | {"lm_head.weight": torch.zeros(28, 8)})),
    "one is missing": (lambda m: m, lambda m: in_front("module.")(_without_head(m))),
    "one without it": (lambda m: m, lambda m: in_front("module.")(m) | HEAD),
    "one name twice": (lambda m: m, lambda m: in_front("_orig_mod.")(m) | HEAD),
}


@pytest.mark.parametrize("case", UNPROVEN)
def test_what_is_not_proven_to_be_one_model_is_not_compared_as_one(case, tmp_path, capsys):
    a, b = (saved(tmp_path / n, make(llama())) for n, make in zip("ab", UNPROVEN[case], strict=True))
    code, report = differ(a, b, capsys)
    assert code == 1 and not [note for note in report["notes"] if SAID in note]
    assert sum(one["kind"] == "only in A" for one in report["tensors"]) >= len(llama()) - 1


def test_objects_of_modules_follow_their_tensors(tmp_path, capsys):
    """`_extra_state` is no tensor, and what stands in other dicts keeps its name."""

    def with_states(model: Tensors) -> dict[str, Any]:
        name = next(iter(model)).removesuffix("weight") + "_extra_state"
        return {"model": {**model, name: {"scale": 2}}, "rng": {"module.seed": [3]}}

    a = saved(tmp_path / "a", with_states(llama()))
    b = saved(tmp_path / "b", with_states(in_front("module.")(llama())))
    code, report = differ(a, b, capsys)
    assert code == 0 and len(report["notes"]) == 1


def test_a_model_under_its_own_keys_is_not_respelled(tmp_path, capsys):
    """One side without an optimizer: nothing is said of names, which are the same."""
    a, b = saved(tmp_path / "a", trained(llama())), saved(tmp_path / "b", {"model": llama()})
    code, report = differ(a, b, capsys)
    assert code == 1 and not report["notes"]
    assert sum(one["kind"] == "equal" for one in report["tensors"]) == len(llama())
