"""`verify HF --against RUN`: accounts of exports and imports balance, and every hole in one is found by counting."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_tools.cli.app import run
from ckpt_tools.commands.diff import diff_checkpoints
from ckpt_tools.commands.export_hf import ExportOptions, export_hf
from ckpt_tools.commands.import_hf import ImportOptions, import_hf
from ckpt_tools.commands.verify import VerifyOptions, verify_checkpoint, verify_checkpoints
from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.huggingface.config import read_config
from ckpt_tools.megatron.huggingface.identify import family_of_config
from ckpt_tools.megatron.huggingface.rules import expand
from ckpt_tools.verify.accounts import Amount, Audit, Carried, Inventory
from ckpt_tools.verify.report import Report
from tests.cases import cases as cases  # noqa: PLC0414  a fixture
from tests.commands.test_huggingface import CONFIGS, model
from tests.commands.test_plain_to_hf import OPTIMIZER, llama, reference, saved, wrapped
from tests.conftest import DATA, fixture_dir
from tests.megatron.huggingface.by_rules import DEEPSEEK, LLAMA

RUN = DATA / "core019_llama_tp2_fully_reshardable"
FSDP = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")


def audited(output: Path, source: Path, **options: Any) -> tuple[Report, Audit]:
    report = verify_checkpoint(output, None, VerifyOptions(against=str(source), **options))
    assert report.audit is not None, report.findings
    return report, report.audit


def errors(report: Report) -> dict[str, str]:
    return {f.where: f.message for f in report.findings if f.check == "audit"}


def whys(parts: Any) -> dict[str, Amount]:
    return {part.why: part.amount for part in parts}


@pytest.mark.parametrize("to", ["torch_dist", "fsdp_dtensor"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_accounts_of_an_import_and_its_export_balance(name: str, to: Any, tmp_path: Path) -> None:
    tensors = model(name, tmp_path / "hf")
    values, rows = sum(array.size for array in tensors.values()), int(str(CONFIGS[name]["vocab_size"]))
    import_hf(tmp_path / "hf", tmp_path / "run", ImportOptions(to=to, fsdp=weights()))
    report, audit = audited(tmp_path / "run", tmp_path / "hf")
    assert report.is_valid and not audit.imbalances()
    assert audit.source.total == (len(tensors), values, 4 * values)
    assert sum(one.output.values for one in audit.carried) == values and not audit.only_in_source
    (padding,) = (why for why in whys(audit.only_in_output) if why.startswith("vocabulary"))
    assert padding == f"vocabulary padding, {128 - rows} rows after {rows} tokens"
    export_hf(tmp_path / "run", tmp_path / "out", ExportOptions(max_shard_bytes=2000))
    report, audit = audited(tmp_path / "out", tmp_path / "run")
    assert report.is_valid and audit.output.total == (len(tensors), values, 4 * values)


def weights() -> Any:
    from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions

    return TargetOptions(fresh_optimizer=False, tp=1)  # which hybrids ask for


@pytest.mark.parametrize(("source", "options", "alone"), [
    (RUN, {}, {"optimizer: fp32 masters": 9, "optimizer: exp_avg": 9, "optimizer: exp_avg_sq": 9}),
    (RUN, {"dtype": "float32"},
     {"weights whose fp32 masters were exported": 9, "optimizer: exp_avg": 9, "optimizer: exp_avg_sq": 9}),
    (RUN, {"dtype": "float16"}, {"optimizer: fp32 masters": 9, "optimizer: exp_avg": 9, "optimizer: exp_avg_sq": 9}),
    (FSDP, {}, {"optimizer: exp_avg": 17, "optimizer: exp_avg_sq": 17, "optimizer: steps and the like": 17,
                "state of the run": 10}),
])  # fmt: skip
def test_what_only_the_source_has_is_named_and_counted(
    source: Path, options: Any, alone: dict[str, int], tmp_path: Path
) -> None:
    export_hf(source, tmp_path / "out", ExportOptions(**options))
    report, audit = audited(tmp_path / "out", source)
    assert report.is_valid, report.findings
    found = whys(audit.only_in_source)
    assert found.pop("vocabulary padding, 23 rows after 201 tokens").values == 2 * 23 * 32
    assert {why: amount.tensors for why, amount in found.items() if amount.tensors > 2} == alone
    assert not audit.only_in_output
    (row,) = audit.carried
    assert row.output_dtype == options.get("dtype", "bfloat16")
    assert row.source_dtype == (
        "bfloat16" if source == RUN and options.get("dtype") != "float32" else "float32"
    )
    assert row.output == audit.output.total


def test_masters_of_fsdp_are_what_an_export_is_rounded_from(tmp_path: Path) -> None:
    export_hf(FSDP, tmp_path / "out")
    (row,) = audited(tmp_path / "out", FSDP)[1].carried
    assert (row.source_dtype, row.output_dtype) == ("float32", "bfloat16")
    assert row.source.nbytes == 2 * row.output.nbytes


Damage = Callable[[dict[str, Any]], Any]
Q = "model.layers.1.self_attn.q_proj.weight"


def lose(tensors: dict[str, Any]) -> None:
    del tensors[Q]


def grow(tensors: dict[str, Any]) -> None:
    tensors["model.extra.weight"] = np.ones(3, np.float32)


def turn(tensors: dict[str, Any]) -> None:
    key = "model.layers.0.mlp.down_proj.weight"
    tensors[key] = np.ascontiguousarray(tensors[key].T)


def count(tensors: dict[str, Any]) -> None:
    tensors[Q] = tensors[Q].astype(np.int32)


def cut(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]


@pytest.mark.parametrize(
    ("damage", "where", "text"),
    [
        (lose, Q, "is missing in the model; the checkpoint has it"),
        (grow, "model.extra.weight", "float32 [3] of the model is made of no parameter of the checkpoint"),
        (turn, "model.layers.0.mlp.down_proj.weight", "has shape ["),
        (count, Q, "is int32; float32 of the checkpoint does not become that"),
        (cut, "lm_head.weight", "has shape [10, 12]; the checkpoint and config.json give [11, 12]"),
    ],
)
def test_a_hole_is_found_and_both_sides_are_still_accounted_for(
    damage: Damage, where: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever side is the output."""
    tensors = model("llama", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run")
    damage(tensors)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    for pair in (("hf", "run"), ("run", "hf")):
        report, audit = audited(*(tmp_path / name for name in pair))
        assert list(errors(report)) == [where] and text in errors(report)[where]
        assert not audit.imbalances()
        assert run(["verify", str(tmp_path / pair[0]), "--against", str(tmp_path / pair[1])]) == 1
        shown = capsys.readouterr().out
        assert f"error: audit: {where}: " in shown and "carried over" in shown


def test_a_parameter_that_nothing_was_made_of_is_an_error(cases: Path, tmp_path: Path) -> None:
    """Quantizers' scales are no part of a model; where the export was told to leave them out, so is the audit."""
    source, globs = cases / "quantizer_keys", ("*quantizer*",)
    export_hf(source, tmp_path / "hf", ExportOptions(ignore_keys=globs))
    report = verify_checkpoint(tmp_path / "hf", None, VerifyOptions(against=str(source)))
    (text,) = errors(report).values()
    assert "quantizer" in text and not report.is_valid and report.audit is None
    report, audit = audited(tmp_path / "hf", source, ignore_keys=globs)
    assert report.is_valid and whys(audit.only_in_source)["--ignore-keys"].tensors > 0


@pytest.mark.parametrize("form", ["fused", "bare", "copies", "head", "frequencies"])
def test_models_in_other_forms_are_seen_through(form: str, tmp_path: Path) -> None:
    """Experts stacked by transformers 5, names without `model.`, weights stored once more; `diff` sees them too."""
    name = {"fused": "qwen3_moe", "copies": "deepseek_v3", "head": "gemma"}.get(form, "llama")
    tensors = model(name, tmp_path / "hf")
    plain = sum(array.size for array in tensors.values())
    import_hf(tmp_path / "hf", tmp_path / "run")
    extra = reshape(form, tensors)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    report, audit = audited(tmp_path / "hf", tmp_path / "run")
    assert report.is_valid, report.findings
    assert sum(one.output.values for one in audit.carried) == plain
    found = whys(audit.only_in_output)
    assert sum(amount.tensors for amount in found.values()) == len(extra)
    assert all(any(word in why for why in found) for word in extra)
    assert diff_checkpoints(tmp_path / "hf", tmp_path / "run").is_equal


def reshape(form: str, tensors: dict[str, Any]) -> list[str]:
    """Bring the tensors into a form, in place; a word of the reason for each that is there once more."""
    if form == "fused":
        stack_experts(tensors)
    elif form == "bare":
        for key in [key for key in tensors if key.startswith("model.")]:
            tensors[key.removeprefix("model.")] = tensors.pop(key)
    elif form == "copies":
        last = DEEPSEEK["num_hidden_layers"]
        tensors[f"model.layers.{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"model.layers.{last}.shared_head.head.weight"] = tensors["lm_head.weight"]
        return ["the same values as model.embed_tokens.weight", "the same values as lm_head.weight"]
    elif form == "head":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        return ["the same values as model.embed_tokens.weight, as config.json says"]
    elif form == "frequencies":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
        return ["rotary frequencies are computed"]
    return []


def stack_experts(tensors: dict[str, Any]) -> None:
    for layer in {key.split(".experts.")[0] for key in tensors if ".experts." in key}:
        parts: dict[str, list[Any]] = {}
        for name in ("gate_proj", "up_proj", "down_proj"):
            parts[name] = [tensors.pop(f"{layer}.experts.{e}.{name}.weight") for e in range(3)]
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        tensors[f"{layer}.experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in pairs])
        tensors[f"{layer}.experts.down_proj"] = np.stack(parts["down_proj"])


def test_codes_and_scales_are_counted_as_the_values_they_stand_for(tmp_path: Path) -> None:
    model("deepseek_v3", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run", ImportOptions(dtype="bfloat16"))
    export_hf(tmp_path / "run", tmp_path / "out", ExportOptions(quantize="fp8-block"))
    report, audit = audited(tmp_path / "out", tmp_path / "run")
    assert report.is_valid, report.findings
    codes = next(one for one in audit.carried if one.output_dtype == "float8_e4m3fn")
    assert codes.source_dtype == "bfloat16" and codes.source.nbytes == 2 * codes.output.nbytes
    tensors = load_headers(tmp_path / "out")
    scales = [shape for key, shape in tensors.items() if key.endswith("_scale_inv")]
    found = whys(audit.only_in_output)["scales and zero points of codes"]
    assert found == (len(scales), sum(map(prod, scales)), 4 * sum(map(prod, scales))) and scales


def load_headers(folder: Path) -> dict[str, list[int]]:
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return {key: info["shape"] for key, info in header.items() if key != "__metadata__"}


def test_no_value_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source's data files may be gone, and those of a model as long as they were but empty."""
    export_hf(RUN, tmp_path / "hf")
    run_dir = shutil.copytree(RUN, tmp_path / "run")
    for file in run_dir.rglob("*.distcp"):
        if file.name not in data_with_common(run_dir):
            file.write_bytes(b"")
    file = tmp_path / "hf" / "model.safetensors"
    size, head = file.stat().st_size, int.from_bytes(file.read_bytes()[:8], "little")
    kept = file.read_bytes()[: 8 + head]
    file.write_bytes(kept + bytes(size - len(kept)))
    report, audit = audited(tmp_path / "hf", run_dir)
    assert report.is_valid and not audit.imbalances()


def data_with_common(root: Path) -> set[str]:
    """Files that hold objects: the common state is one in core 0.19."""
    from ckpt_tools.commands.opened import open_checkpoint

    with open_checkpoint(str(root)) as opened:
        return {entry.item.file for entry in opened.catalog.objects.values()}


def test_what_cannot_be_audited_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_hf(RUN, tmp_path / "hf")
    hf, source = str(tmp_path / "hf"), str(RUN)
    for words, text in (
        (["verify", hf, "--against", hf], "one side is a Hugging Face model"),
        (["verify", source, "--against", str(FSDP)], "`diff` compares any two"),
        (["verify", hf, source, "--against", source], "--against is for one checkpoint"),
        (["verify", hf, "--rules", "rules.yaml"], "they go with --against"),
        (["verify", hf, "--ignore-keys", "x"], "they go with --against"),
    ):
        assert run([*words, "-q"]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(UsageError, match="--against is for one"):
        verify_checkpoints([hf, source], None, VerifyOptions(against=source))
    (tmp_path / "hf" / "config.json").unlink()
    assert run(["verify", hf, "--against", source]) == 1
    assert "no config.json" in capsys.readouterr().out


def test_the_iteration_is_that_of_the_run(tmp_path: Path) -> None:
    export_hf(RUN, tmp_path / "hf")
    for pair in ((tmp_path / "hf", RUN), (RUN, tmp_path / "hf")):
        report = verify_checkpoint(pair[0], 2, VerifyOptions(against=str(pair[1])))
        assert report.is_valid and report.audit is not None
    assert run(["verify", str(tmp_path / "hf"), "--against", str(RUN), "--iteration", "7"]) == 3


def test_another_model_is_no_source(tmp_path: Path) -> None:
    model("llama", tmp_path / "hf")
    other = {**LLAMA, "intermediate_size": int(str(LLAMA["intermediate_size"])) + 2}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(other))
    report = verify_checkpoint(tmp_path / "hf", None, VerifyOptions(against=str(RUN)))
    assert report.audit is None and not report.is_valid
    assert load_file(tmp_path / "hf" / "model.safetensors")


def test_accounts_that_do_not_add_up_are_told() -> None:
    side = Inventory("a", "safetensors", {"bfloat16": Amount(2, 10, 20)})
    row = Carried("bfloat16", "bfloat16", Amount(2, 10, 20), Amount(1, 9, 18))
    wrong = Audit(side, side, (row,), (), ()).imbalances()
    assert wrong == [
        "the output holds 2 tensors, and 1 are explained",
        "the output holds 10 values, and 9 are explained",
        "the output holds 20 bytes, and 18 are explained",
        "other numbers of values were carried on both sides",
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("core019_llama_tp2_dp_reshardable", "padding of flat buckets"),
        ("v013_dense_dpzero_tp2_dp2", "padding of flat buckets"),  # whose buckets lie in objects
        ("v016_dense_fr_tp2_dp2_te", None),
        ("main_dense_dpr_pp2_vpp2_tied", "padding of flat buckets"),
        ("te_remainder_tp2_fr", "codes, scales or remainders that weights are computed from"),
    ],
)
def test_masters_of_every_layout_are_accounted_for(name: str, why: str | None, tmp_path: Path) -> None:
    """An export in float32 takes them from wherever they are."""
    source = fixture_dir(name)
    source = source / "checkpoint" if (source / "checkpoint").is_dir() else source
    export_hf(source, tmp_path / "out", ExportOptions(dtype="float32"))
    report, audit = audited(tmp_path / "out", source)
    assert report.is_valid and not audit.imbalances(), report.findings
    assert sum(one.output.values for one in audit.carried) == audit.output.total.values
    assert why is None or whys(audit.only_in_source)[why].values > 0


def test_a_plain_state_dict_is_a_source_too(tmp_path: Path) -> None:
    assert run(["convert", str(RUN), str(tmp_path / "dcp"), "--to", "dcp", "-q"]) == 0
    export_hf(RUN, tmp_path / "out")
    report, audit = audited(tmp_path / "out", tmp_path / "dcp")
    assert report.is_valid and audit.source.format == "dcp"
    assert {"optimizer: exp_avg", "optimizer: exp_avg_sq"} <= whys(audit.only_in_source).keys()


def test_deepseek_v3_has_what_bridge_counts() -> None:
    """Its audit of the released model (Megatron-Bridge #5790): the rules give its numbers from config.json alone."""
    sizes = {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
             "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128,
             "num_key_value_heads": 128, "n_routed_experts": 256, "first_k_dense_replace": 3, "kv_lora_rank": 512,
             "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128}  # fmt: skip
    config = {**DEEPSEEK, **sizes}
    family = family_of_config(config)
    pairs = expand(family, replace(read_config(family, config), padded_vocab_size=sizes["vocab_size"]))
    shapes = [one.shape for pair in pairs for one in pair.tensors]
    shapes += [(129280, 7168)] * len(family.copies)  # which the release has in its prediction layer once more
    assert (len(shapes), sum(map(prod, shapes))) == (46_183, 684_489_845_504)


def plain(tmp_path: Path, made: Callable[[dict[str, Any]], dict[str, Any]] = lambda model: model) -> Path:
    """A DCP of a model with Hugging Face names, in a program's wrapper, beside the folder it became."""
    truth = llama()
    state = made({"net": wrapped(truth), "optimizer": OPTIMIZER, "step": torch.tensor(3)})
    source = saved(tmp_path / "dcp", state)
    folder = reference(tmp_path / "hf")
    save_file({name: tensor.numpy() for name, tensor in truth.items()}, folder / "model.safetensors")
    return source


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_dict_of_the_models_own_names_is_a_source_behind_its_prefix(tmp_path: Path) -> None:
    source = plain(tmp_path)
    report, audit = audited(tmp_path / "hf", source)
    assert report.is_valid and not audit.imbalances(), report.findings
    assert audit.notes == (f"the names are those behind 'net.' in {source}",)
    assert [(one.source.tensors, one.output.tensors) for one in audit.carried] == [(21, 21)]
    alone = {why: amount.tensors for why, amount in whys(audit.only_in_source).items()}
    assert alone == {"optimizer: exp_avg": 1, "optimizer: steps and the like": 1, "state of the run": 1}
    assert not audit.only_in_output


UP = "net._orig_mod.model.layers.0.mlp.up_proj.weight"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("change", "where", "said"), [
    (lambda s: s["net"].pop(UP[4:]), UP[14:], "of the model is made of no parameter"),
    (lambda s: s["net"].update({UP[4:]: torch.ones(7, 8)}), UP[14:], "has shape [20, 8]"),
    (lambda s: s["net"].update({UP[4:]: torch.ones(20, 8).int()}), UP[14:], "int32 of the checkpoint does not"),
    (lambda s: s["net"].update({"_orig_mod.model.extra": torch.ones(3)}), "model.extra", "is missing in the model"),
    (lambda s: s["net"].update({"_orig_mod.extra": torch.ones(3)}), "extra", "is missing in the model"),
    (lambda s: s["net"].update({"a.b": torch.ones(3)}) or s.update(net={f"x.{k}" if k != "a.b" else k: t
                                                                       for k, t in s["net"].items()}),
     "net.a.b", "knows of no such tensor"),
])  # fmt: skip
def test_a_hole_in_the_accounts_of_a_state_dict_is_found(
    change: Any, where: str, said: str, tmp_path: Path
) -> None:
    source = plain(tmp_path, lambda state: (change(state), state)[1])
    report, audit = audited(tmp_path / "hf", source)
    assert not audit.imbalances()
    assert [(key, said in text) for key, text in errors(report).items()] == [(where, True)], errors(report)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tied_head_of_a_state_dict_is_not_missing(tmp_path: Path) -> None:
    """In either of both: what follows from the rest is named, and no hole."""
    source = plain(tmp_path)
    folder = reference(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    report, audit = audited(folder, source)
    assert report.is_valid and whys(audit.only_in_source)[TIED].tensors == 1
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    without = saved(tmp_path / "without", {name: torch.from_numpy(array) for name, array in tensors.items()})
    report, audit = audited(folder, without)
    assert report.is_valid and whys(audit.only_in_output)[TIED].tensors == 1


TIED = "tied to model.embed_tokens.weight, which has the same bytes"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected")
@pytest.mark.parametrize("twice", [False, True])
def test_a_wrapped_model_of_megatrons_names_is_a_source_too(twice: bool, tmp_path: Path) -> None:
    """Unless two of its tensors are one without their wrappers."""
    assert run(["convert", str(RUN), str(tmp_path / "dcp"), "--to", "dcp", "--weights-only", "-q"]) == 0
    export_hf(RUN, tmp_path / "out")
    stored = tmp_path / "dcp" / "iter_0000002"
    metadata = dcp.FileSystemReader(stored).read_metadata().state_dict_metadata
    held = {k: torch.empty(m.size) for k, m in metadata.items() if isinstance(m, TensorStorageMetadata)}
    dcp.load(held, checkpoint_id=stored, no_dist=True)
    inside = {key.replace(".mlp.", "._checkpoint_wrapped_module.mlp."): t for key, t in held.items()}
    model = {key.replace("model.", "_fsdp_wrapped_module.", 1): tensor for key, tensor in inside.items()}
    if twice:
        model |= {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in model.items()}
    source = saved(tmp_path / "wrapped", {"model": model})
    report = verify_checkpoint(tmp_path / "out", None, VerifyOptions(against=str(source)))
    assert report.is_valid != twice
    assert [text for text in errors(report).values() if "one without their wrappers" not in text] == []
    if not twice:
        differing = [one for one in diff_checkpoints(tmp_path / "dcp", source).tensors if one.kind != "equal"]
        assert differing == []
