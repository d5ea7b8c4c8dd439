"""`diff` of two state dicts of one model, one of which has it inside of a wrapper or of another dict."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools.cli.app import run
from tests.commands.test_plain_to_hf import Tensors, llama, reference, saved, wrapped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

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
