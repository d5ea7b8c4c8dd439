"""PEFT directories by hand: what is merged and how, what is refused and why. The real peft: `test_peft_peers.py`."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from ckpt_tools.commands.huggingface.export_hf import export_hf
from ckpt_tools.commands.huggingface.export_source import ExportOptions
from ckpt_tools.commands.huggingface.import_hf import ImportOptions, import_hf
from ckpt_tools.commands.job.report import ConversionReport
from ckpt_tools.errors import (
    CkptError,
    CorruptCheckpointError,
    MappingError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.huggingface.lora import peft_targets
from ckpt_tools.megatron.huggingface.lora.peft import PeftSettings, read_peft_settings, with_adapter
from ckpt_tools.megatron.huggingface.mapping.rules import SMALLEST
from ckpt_tools.model.catalog import Catalog, TensorEntry
from tests.commands.test_huggingface import GPT2
from tests.conftest import RUN
from tests.megatron.adapter_checkpoints import FC1, FC2, PROJ, QKV, AdapterFolder, canonical, lora
from tests.megatron.huggingface.by_rules import LLAMA, QWEN3_MOE, Arrays, directory
from tests.megatron.huggingface.quantized_models import fp8_blocks

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 3}
Q = "model.layers.0.self_attn.q_proj"


def numbers(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def model(folder: Path, config: dict[str, Any] | None = None) -> Arrays:
    config = config or LLAMA
    folder.mkdir()
    tensors = dict(directory(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def peft(folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> str:
    folder.mkdir()
    save_file(
        {f"base_model.model.{name}": value for name, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    return str(folder)


def merge(source: Path | str, place: str, out: Path) -> ConversionReport:
    """The adapter merged on the way to Megatron, and the model back at `out`."""
    run = f"{out}_run"
    report = import_hf(str(source), run, ImportOptions(adapter=place))
    export_hf(run, str(out))
    return report


def pair(module: str, out: int, into: int, rank: int = 2, seed: int = 7) -> dict[str, Any]:
    return {
        f"{module}.lora_A.weight": numbers(seed, rank, into),
        f"{module}.lora_B.weight": numbers(seed + 1, out, rank),
    }


def added(weight: Any, matrices: dict[str, Any], module: str, scale: float) -> Any:
    a, b = (torch.from_numpy(matrices[f"{module}.lora_{side}.weight"]).double() for side in "AB")
    return (torch.from_numpy(weight).double() + scale * (b @ a)).to(torch.float32).numpy()


EXPERT = "model.layers.1.mlp.experts.2.up_proj"
OF_EXPERTS = {"rank_pattern": {"up_proj": 3}, "alpha_pattern": {EXPERT: 9}}


@pytest.mark.parametrize(
    ("base", "matrices", "settings", "scales", "to"),
    [(LLAMA, pair(Q, 16, 12), {}, {Q: 1.5}, "torch_dist"),
     (LLAMA, pair(Q, 16, 12, rank=4), {"use_rslora": True, "r": 4}, {Q: 1.5}, "torch_dist"),
     *((QWEN3_MOE, pair(Q, 16, 12) | pair(EXPERT, 6, 12, rank=3), OF_EXPERTS, {Q: 1.5, EXPERT: 3.0}, to)
       for to in ("torch_dist", "fsdp_dtensor"))],
    ids=["plain", "rslora", "experts", "experts of FSDP"],
)  # fmt: skip
def test_weights_are_merged_and_all_else_is_as_it_was(base, matrices, settings, scales, to, tmp_path):  # fmt: skip
    before = model(tmp_path / "hf", base)
    place = peft(tmp_path / "peft", dict(matrices), settings)
    options = ImportOptions(to=to, adapter=place, fsdp=TargetOptions(fresh_optimizer=False))
    report = import_hf(str(tmp_path / "hf"), str(tmp_path / "run"), options)
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    for key, value in before.items():
        module = key.removesuffix(".weight")
        scale = scales.get(module)
        expected = added(value, dict(matrices), module, scale) if scale else value
        assert after[key].tobytes() == expected.tobytes(), key
    assert f"an adapter was added to {len(scales)} tensors, in float64 and rounded once" in report.notes


SQUARE_LLAMA, SQUARE_GPT2 = "model.layers.0.mlp.down_proj", "transformer.h.1.attn.c_proj"


@pytest.mark.parametrize("fan_in_fan_out", [True, False])
@pytest.mark.parametrize(
    ("base", "square", "is_conv1d"),
    [(GPT2, SQUARE_GPT2, True), ({**LLAMA, "intermediate_size": 12}, SQUARE_LLAMA, False)],
)
def test_a_square_weight_is_turned_if_its_module_is_a_conv1d(
    base, square, is_conv1d, fan_in_fan_out, tmp_path
):
    """PEFT goes by the class of the module too, and corrects the flag."""
    before, matrices = model(tmp_path / "hf", base), pair(square, 12, 12)
    place = peft(tmp_path / "alone", matrices, {"fan_in_fan_out": fan_in_fan_out})
    merge(tmp_path / "hf", place, tmp_path / "out")
    found, weight = (
        load_file(tmp_path / "out" / "model.safetensors")[f"{square}.weight"],
        before[f"{square}.weight"],
    )
    expected = added(weight.T, matrices, square, 1.5).T if is_conv1d else added(weight, matrices, square, 1.5)
    assert found.tobytes() == expected.tobytes()


def test_a_square_weight_of_an_unknown_family_is_not_turned_by_the_flag_alone():
    shapes = {"m.weight": (4, 4), "m.lora_A.weight": (2, 4), "m.lora_B.weight": (4, 2)}
    entries = {name: TensorEntry(name, "float32", shape, ()) for name, shape in shapes.items()}
    base = Catalog("", {"m.weight": entries.pop("m.weight")}, {})
    adapter = Catalog("", entries, {})
    with pytest.raises(MappingError, match="fan_in_fan_out is true, which holds for Conv1D modules only"):
        with_adapter(base, adapter, PeftSettings(2, 3, turned=True), None)
    merged = with_adapter(base, adapter, PeftSettings(2, 3), None)
    assert merged.merged == ("m.weight",)


def test_turned_weights_that_are_not_square_are_recognized_by_their_shape(tmp_path):
    before = model(tmp_path / "hf", GPT2)
    wide = "transformer.h.0.mlp.c_fc"
    both = pair(wide, 48, 12) | pair(SQUARE_GPT2, 12, 12, seed=3)
    merge(tmp_path / "hf", peft(tmp_path / "both", both), tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name in (wide, SQUARE_GPT2):
        expected = added(before[f"{name}.weight"].T, both, name, 1.5).T
        assert after[f"{name}.weight"].tobytes() == expected.tobytes(), name


def test_an_embedding_and_weights_held_whole(tmp_path):
    """PEFT saves an adapted embedding's base beside its adapter; what was trained whole comes without one."""
    before = model(tmp_path / "hf")
    embed = "model.embed_tokens"
    a, b, base, head = numbers(1, 2, 11), numbers(2, 12, 2), numbers(3, 11, 12), numbers(4, 11, 12)
    tensors = {
        f"{embed}.lora_embedding_A": a,
        f"{embed}.lora_embedding_B": b,
        f"{embed}.base_layer.weight": base,
        "lm_head.weight": head,
    }
    saved = {"modules_to_save": ["lm_head"]}
    report = merge(tmp_path / "hf", peft(tmp_path / "peft", tensors, saved), tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    product = (torch.from_numpy(b).double() @ torch.from_numpy(a).double()).T
    expected = (torch.from_numpy(base).double() + 1.5 * product).float().numpy()
    assert after[f"{embed}.weight"].tobytes() == np.ascontiguousarray(expected).tobytes()
    assert after["lm_head.weight"].tobytes() == head.tobytes()
    assert all(
        after[key].tobytes() == before[key].tobytes()
        for key in before
        if key not in (f"{embed}.weight", "lm_head.weight")
    )
    assert f"taken from the adapter, which holds them whole: lm_head.weight, {embed}.weight" in report.notes


def test_a_quantized_base_is_merged_as_it_is_dequantized(tmp_path):
    base = fp8_blocks()
    source = base.save(tmp_path / "hf")
    name = next(key for key in base.plain if key.endswith("layers.1.self_attn.o_proj.weight"))
    out, into = base.plain[name].shape
    matrices = pair(name.removesuffix(".weight"), out, into)
    place = peft(tmp_path / "peft", matrices)
    import_hf(str(source), str(tmp_path / "run"), ImportOptions(adapter=place))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    after = load_torch(tmp_path / "out" / "model.safetensors")
    a, b = (
        torch.from_numpy(matrices[f"{name.removesuffix('.weight')}.lora_{side}.weight"]).double()
        for side in "AB"
    )
    expected = (base.plain[name].double() + 1.5 * (b @ a)).to(base.plain[name].dtype)
    assert torch.equal(after[name], expected)


def refused(error: type[CkptError], tensors: dict[str, Any], tmp_path: Path, config: dict[str, Any] | None = None,
            base: dict[str, Any] | None = None) -> str:  # fmt: skip
    model(tmp_path / "hf", base)
    place = peft(tmp_path / "peft", tensors, config)
    with pytest.raises(error) as caught:
        merge(tmp_path / "hf", place, tmp_path / "out")
    assert not (tmp_path / "out_run").exists()
    return str(caught.value)


def both_sides(a: Any, b: Any) -> dict[str, Any]:
    return {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}


MISFITS: dict[str, tuple[type[CkptError], dict[str, Any], str]] = {
    "no such module": (MappingError, pair("model.layers.9.self_attn.q_proj", 16, 12), "q_proj.weight: the base"),
    "rows": (MappingError, pair(Q, 15, 12), "cannot be added to a weight of shape (16, 12)"),
    "columns": (MappingError, pair(Q, 16, 11), "cannot be added to a weight of shape (16, 12)"),
    "rank": (MappingError, pair(Q, 16, 12, rank=3), "its rank is 3; adapter_config.json says 2"),
    "half": (MappingError, {f"{Q}.lora_A.weight": numbers(0, 2, 12)}, "only lora_A is there"),
    "a matrix twice": (MappingError, pair(Q, 16, 12) | {f"{Q}.lora_A.default.weight": numbers(0, 2, 12)},
                       "a matrix under two names"),
    "nothing": (MappingError, {}, "it holds no tensors"),
    "bias of B": (UnsupportedCheckpointError, pair(Q, 16, 12) | {f"{Q}.lora_B.bias": numbers(0, 16)}, "lora_B.bias"),
    "DoRA": (UnsupportedCheckpointError, {f"{Q}.lora_magnitude_vector": numbers(0, 16)}, "lora_magnitude_vector"),
    "a convolution": (MappingError, both_sides(numbers(0, 2, 12, 1), numbers(0, 16, 2, 1)), "A and B are matrices"),
    "single numbers": (MappingError, both_sides(np.ones((), np.float32), np.ones((), np.float32)),
                       "A and B are matrices"),
    "integers": (MappingError, both_sides(np.ones((2, 12), np.int8), np.ones((16, 2), np.int8)),
                 "not plain floating-point numbers"),
    "whole, of another shape": (MappingError, {"lm_head.weight": numbers(0, 12, 12)}, "(12, 12) in the adapter"),
    "whole, unknown": (MappingError, {"score.weight": numbers(0, 2, 12)}, "score.weight: the base has no such"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named(name, tmp_path):
    error, tensors, message = MISFITS[name]
    assert message in refused(error, tensors, tmp_path)


def test_every_misfit_is_named_at_once(tmp_path):
    text = refused(MappingError, pair(Q, 15, 12) | pair("a.b", 2, 2) | {"c.weight": numbers(0, 2)}, tmp_path)
    assert text.count("\n  - ") == 3


def test_matrices_of_a_conv1d_for_a_linear_are_refused(tmp_path):
    square = {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 12}
    tensors = pair("model.layers.0.self_attn.k_proj", 4, 12) | pair("model.layers.0.mlp.gate_proj", 12, 10)
    text = refused(MappingError, tensors | pair(Q, 12, 12), tmp_path, base=square)
    assert "gate_proj.weight: the adapter's matrices are (in, out), and llama has a Linear there" in text


TIED = {  # a base that ties, by config.json or by its class; its embedding
    "config.json": ({**LLAMA, "tie_word_embeddings": True}, "model.embed_tokens"),
    "class": ({**LLAMA, "model_type": "gemma"}, "model.embed_tokens"),
    "GPT-2": (GPT2, "transformer.wte"),
}


def of_both(embedding: str, changed: str) -> dict[str, Any]:
    """Tensors of an adapter: E and H are embedding and head held whole, = the same bytes for both, e and h LoRA."""
    lora_of = {"e": (f"{embedding}.lora_embedding_A", f"{embedding}.lora_embedding_B")}
    lora_of["h"] = ("lm_head.lora_A.weight", "lm_head.lora_B.weight")
    whole = {"E": f"{embedding}.weight", "H": "lm_head.weight"}
    found = {
        whole[one]: numbers(1 if "=" in changed else ord(one), 11, 12) for one in changed if one in whole
    }
    for one in changed:
        if one in lora_of:
            shapes = ((2, 11), (12, 2)) if one == "e" else ((2, 12), (11, 2))
            found |= {name: numbers(3, *shape) for name, shape in zip(lora_of[one], shapes, strict=True)}
    return found


@pytest.mark.parametrize(
    ("base", "changed", "tie"),
    [*(("config.json", changed, tie) for changed in ("EH=", "EH", "E", "H", "e", "h", "eh", "Eh")
       for tie in (False, True)),
     *((base, changed, True) for base in ("class", "GPT-2") for changed in ("E", "e"))],
)  # fmt: skip
def test_embedding_and_head_of_a_tied_model_stay_one_weight(changed, tie, base, tmp_path):
    """peft trains them apart unless ensure_weight_tying is set; no tied model holds what it trained then."""
    config, embedding = TIED[base]
    tensors, settings = of_both(embedding, changed), {"ensure_weight_tying": tie}
    if changed == "EH=" or (changed == "E" and tie):
        model(tmp_path / "hf", config)
        merge(tmp_path / "hf", peft(tmp_path / "peft", tensors, settings), tmp_path / "out")
        after = load_file(tmp_path / "out" / "model.safetensors")
        assert "lm_head.weight" not in after
        assert after[f"{embedding}.weight"].tobytes() == tensors[f"{embedding}.weight"].tobytes()
    else:
        assert "(tie_word_embeddings, " in refused(MappingError, tensors, tmp_path, settings, config)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [("qwen2_both_equal", None), ("qwen2_both_differ", "lm_head.weight differs from model.embed_tokens.weight"),
     ("qwen2_embedding_saved", "was trained"), ("qwen2_embedding_lora", "was trained"),
     ("gemma_embedding_lora", "was trained")],
)  # fmt: skip
def test_adapters_that_users_trained_on_tied_models(adapter, message, user_cases, tmp_path):
    folder = user_cases / "peft_tied_embeddings"
    source, place = folder / f"base_{adapter.partition('_')[0]}", folder / adapter
    if message is None:
        merge(source, str(place), tmp_path / "out")
        held = load_torch(place / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
        found = load_torch(tmp_path / "out" / "model.safetensors")
        assert (
            torch.equal(found["model.embed_tokens.weight"], held.bfloat16()) and "lm_head.weight" not in found
        )
        return
    with pytest.raises(MappingError, match="tie_word_embeddings") as caught:
        merge(source, str(place), tmp_path / "out")
    assert message in str(caught.value)


OTHER_METHODS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; LORA is merged"),
    ({"use_dora": True}, "use_dora is True: DoRA scales every row"),
    ({"lora_bias": True}, "lora_bias is True: B has a bias"),
    ({"use_qalora": True}, "use_qalora"),
    ({"layer_replication": [[0, 2]]}, "other layers than its base"),
    ({"trainable_token_indices": [1]}, "single rows of the embedding"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts as one tensor"),
    ({"alora_invocation_tokens": [3]}, "nothing can be merged"),
    ({"init_lora_weights": "pissa_niter_4"}, "belongs to a changed base"),
    ({"init_lora_weights": "OLoRA"}, "belongs to a changed base"),
    *(
        ({"init_lora_weights": start}, f"init_lora_weights is {start!r}: not known")
        for start in ("x", "mica", 7)
    ),
    ({"kasa_config": {"beta": 1}}, "kasa_config is {'beta': 1}: not known"),
    ({"rank_pattern": {"(q|k)+_proj": 4}}, "patterns that are not looked up here"),
    ({"alpha_pattern": {".*.*.*.*x": 4}}, "patterns that are not looked up here"),
]
NO_OBJECTS: tuple[Any, ...] = ([], 3, None, "LORA")
WRONG_KINDS: list[tuple[dict[str, Any], str]] = [
    *(({"r": rank}, f"r is {rank}; a whole number above 0 is expected") for rank in (0, 4.0, True, None)),
    *(({"lora_alpha": alpha}, f"lora_alpha is {alpha!r}; a number is expected")
      for alpha in (None, "8", float("nan"), True)),
    ({"rank_pattern": [1]}, "numbers by module names are expected"),
    ({"alpha_pattern": {"q_proj": "8"}}, "numbers by module names are expected"),
    ({"target_modules": 5}, "target_modules is 5; a list of names or a pattern is expected"),
    ({"exclude_modules": [""]}, "exclude_modules is ['']; a list of names or a pattern is expected"),
    ({"layers_to_transform": ["1"]}, "layers_to_transform is ['1']; layer numbers are expected"),
    ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; a list of names is expected"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "config", "message"),
    [*((UnsupportedCheckpointError, {**CONFIG, **one}, said) for one, said in OTHER_METHODS),
     *((MappingError, {**CONFIG, **one}, said) for one, said in WRONG_KINDS),
     *((UnsupportedCheckpointError, one, "adapter_config.json is not an object") for one in NO_OBJECTS)],
)  # fmt: skip
def test_settings_that_are_not_merged(error, config, message):
    with pytest.raises(error) as caught:
        read_peft_settings(config)
    assert message in str(caught.value)


def test_settings_without_a_part_in_what_is_added_are_skipped():
    settings = read_peft_settings({
        **CONFIG, "task_type": "CAUSAL_LM", "lora_dropout": 0.1, "target_modules": ["q_proj"], "bias": "all",
        "modules_to_save": ["lm_head"], "init_lora_weights": "gaussian", "megatron_core": "megatron.core",
        "use_dora": False, "eva_config": {}, "base_model_name_or_path": "x", "inference_mode": True,
    })  # fmt: skip
    assert settings.scale("model.layers.0.self_attn.q_proj", 2) == 1.5


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [("q_proj", True), ("self_attn.q_proj", True), ("layers.0.self_attn.q_proj", True), ("proj", False),
     ("^model.layers.0.self_attn.q_proj", True), ("^layers.0.self_attn.q_proj", False), (r"layers\.\d.q_proj", None),
     (".*q_proj", True), ("layers.1.*", False), ("layers.0.*", True), ("q_proj$", True)],
)  # fmt: skip
def test_patterns_are_looked_up_as_peft_does(pattern, fits):
    """peft utils/other.py `get_pattern_key`: a pattern stands for the end of a name, after a dot."""
    config = {**CONFIG, "alpha_pattern": {pattern: 8}}
    if fits is None:
        with pytest.raises(UnsupportedCheckpointError):
            read_peft_settings(config)
    else:
        assert read_peft_settings(config).scale(Q, 2) == (4.0 if fits else 1.5)


ELSEWHERE = [
    ({"target_modules": ["attn.q_proj"]}, f"{Q}: target_modules does not name it"),
    ({"target_modules": []}, f"{Q}: target_modules does not name it"),
    ({"target_modules": ["proj", "_proj"]}, f"{Q}: target_modules does not name it"),
    ({"target_modules": "q_proj"}, f"{Q}: target_modules does not name it"),  # a pattern of whole names
    ({"target_modules": r".*\.(k|v)_proj"}, f"{Q}: target_modules does not name it"),
    ({"target_modules": ["q_proj"], "layers_to_transform": 1}, f"{Q}: layers_to_transform is [1]"),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1, 7]}, f"{Q}: layers_to_transform is [1, 7]"),
    ({"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]}, f"{Q}: exclude_modules names it"),
    ({"exclude_modules": r".*layers\.0\..*"}, f"{Q}: exclude_modules names it"),
    ({"target_modules": ["q_proj", "v_proj"]}, "target_modules names v_proj, and the adapter has no tensor of it"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save names lm_head, and the adapter has no tensor of it"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), ELSEWHERE)
def test_an_adapter_of_other_places_is_refused(config, message, tmp_path):
    text = refused(MappingError, pair(Q, 16, 12), tmp_path, config)
    assert message in text.splitlines()[1] and len(text.splitlines()) == 2


UNTRIED = r"(?:.*?self_attn)+\.q_proj"


@pytest.mark.parametrize(
    ("config", "notes"),
    [
        ({"target_modules": [Q]}, []),
        ({"target_modules": [Q], "layers_to_transform": [1]}, []),  # a whole name is of no other layer
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, []),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"}, []),
        ({"target_modules": ["q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]}, []),
        ({"target_modules": [Q, "query_key_value"]}, []),  # no such module in the base
        ({"target_modules": r".*layers\.0.*\.(q|query)_proj"}, []),
        ({"target_modules": "all-linear"}, []),
        ({"target_modules": "All-Linear", "modules_to_save": ["score"]}, []),
        ({"target_modules": None, "exclude_modules": None, "modules_to_save": None}, []),
        ({"target_modules": ["q_proj"]}, ["1 that stay as they are: model.layers.1.self_attn.q_proj"]),
        ({"target_modules": UNTRIED}, [f"target_modules {UNTRIED!r} is a pattern that is not tried here"]),
        ({"exclude_modules": "("}, ["exclude_modules '(' is a pattern that is not tried here"]),
    ],
)
def test_an_adapter_of_the_places_that_are_named_is_merged(config, notes, tmp_path):
    before, matrices = model(tmp_path / "hf"), pair(Q, 16, 12)
    place = peft(tmp_path / "peft", matrices, config)
    report = merge(tmp_path / "hf", place, tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    expected = added(before[f"{Q}.weight"], matrices, Q, 1.5)
    assert after[f"{Q}.weight"].tobytes() == expected.tobytes()
    found = [note for note in report.notes if "target_modules" in note or "exclude_modules" in note]
    assert len(found) == len(notes) and all(part in note for part, note in zip(notes, found, strict=True))


@pytest.mark.parametrize("side", "AB")
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_tensor_that_is_not_finite_is_named(side, odd, tmp_path):
    model(tmp_path / "hf")
    tensors = pair(Q, 16, 12)
    tensors[f"{Q}.lora_{side}.weight"][1, 1] = odd
    place = peft(tmp_path / "peft", tensors)
    with pytest.raises(CorruptCheckpointError) as caught:
        merge(tmp_path / "hf", place, tmp_path / "out")
    assert f"the adapter's base_model.model.{Q}.lora_{side}.weight of {place} holds {odd!r}" in str(
        caught.value
    )
    assert not (tmp_path / "out_run" / "release").exists()


def test_an_output_on_the_base_is_said_to_be_there(tmp_path):
    model(tmp_path / "hf")
    base, place = str(tmp_path / "hf"), peft(tmp_path / "peft", pair(Q, 16, 12))
    for output in (base, place):
        with pytest.raises(UsageError) as caught:
            import_hf(base, output, ImportOptions(adapter=place))
        assert f"the output {output} and the source {output} overlap" in str(caught.value)


def test_an_adapter_that_is_no_folder_is_said_to_be_none(tmp_path):
    model(tmp_path / "hf")
    for name, message in (
        ("nothing", "nothing does not exist"),
        ("hf/config.json", "config.json is a file; give"),
    ):
        for prefix in ("", "file://"):
            with pytest.raises(UnsupportedCheckpointError, match=message):
                options = ImportOptions(adapter=f"{prefix}{tmp_path / name}")
                import_hf(str(tmp_path / "hf"), str(tmp_path / "run"), options)


def test_damaged_and_missing_files_are_named(tmp_path):
    model(tmp_path / "hf")
    place = Path(peft(tmp_path / "peft", pair(Q, 16, 12)))
    (place / "adapter_config.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match="not JSON"):
        merge(tmp_path / "hf", str(place), tmp_path / "out")
    (place / "adapter_model.safetensors").rename(place / "adapter_model.bin")
    with pytest.raises(UnsupportedCheckpointError, match="safe_serialization=True"):
        merge(tmp_path / "hf", str(place), tmp_path / "out")
    with pytest.raises(UnsupportedCheckpointError, match="is not a PEFT directory: it has no adapter_config"):
        import_hf(str(tmp_path / "hf"), str(tmp_path / "run"), ImportOptions(adapter=str(tmp_path / "hf")))
    with pytest.raises(UsageError, match="overlap"):
        import_hf(str(tmp_path / "hf"), str(place / "run"), ImportOptions(adapter=str(place)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base of the adapters of `lora`, as a Hugging Face model."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    export_hf(str(RUN), str(folder))
    return str(folder)


def export(made: AdapterFolder, base: str | None, tmp_path: Path, **options: Any) -> dict[str, Any]:
    adapter = made.save(tmp_path / "adapter")
    export_hf(str(adapter), str(tmp_path / "peft"), ExportOptions(peft=True, hf_config=base, **options))
    found: dict[str, Any] = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    return found


def test_parts_of_a_fused_linear_share_its_a(exported, tmp_path):
    made = lora(tp=2, dtype=torch.float32)
    config = export(made, exported, tmp_path)
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(found) == 2 * 2 * 7
    a, b = made.matrices[QKV]
    head = lambda start: b[1, start : start + 8]  # noqa: E731  # of rows: (q q k v) of 2 groups, 8 each
    rows = {"q": [0, 8, 32, 40], "k": [16, 48], "v": [24, 56]}
    for part, starts in rows.items():
        name = f"base_model.model.model.layers.1.self_attn.{part}_proj"
        assert found[f"{name}.lora_A.weight"].tobytes() == a[1].numpy().tobytes()
        assert (
            found[f"{name}.lora_B.weight"].tobytes() == torch.cat(list(map(head, starts))).numpy().tobytes()
        )
    assert config["base_model_name_or_path"] == exported
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 6, False)


def test_parts_of_their_own_become_linears_of_their_own(exported, tmp_path):
    made = canonical(tp=2, dtype=torch.float32)
    export(made, exported, tmp_path)
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    places = {f"self_attn.{p}_proj": f"{QKV}.adapter_{p}" for p in "qkv"}
    places |= {f"mlp.{p}_proj": f"{FC1}.adapter_{p}" for p in ("gate", "up")}
    for name, module in places.items():
        for side, whole in zip("AB", made.matrices[module], strict=True):
            key = f"base_model.model.model.layers.1.{name}.lora_{side}.weight"
            assert found[key].tobytes() == whole[1].numpy().tobytes(), key


def test_modules_are_named_whole_where_their_last_name_means_others(exported, tmp_path):
    made = AdapterFolder()
    made.add("decoder.layers.1.self_attention.linear_proj.adapter", (), 32, 32)
    made.add(FC2, (2,), 32, 64)
    made.rank = 5
    made.add("decoder.layers.0.mlp.linear_fc1.adapter.adapter_up", (), 64, 32)
    made.rank = 3
    place = made.save(tmp_path / "adapter")
    settings = (
        (place / "run_config.yaml").read_text().replace("  dim: 3\n", "")
    )  # ranks differ: none is named
    (place / "run_config.yaml").write_text(settings)
    export_hf(str(place), str(tmp_path / "peft"), ExportOptions(peft=True, hf_config=exported))
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    named = ["down_proj", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj"]
    assert config["target_modules"] == named
    assert config["rank_pattern"] == {"model.layers.0.mlp.up_proj": 5}


def test_exports_that_cannot_be_are_refused(exported, tmp_path):
    made = lora()
    with pytest.raises(UsageError, match="pass its directory with --hf-config"):
        export(made, None, tmp_path)
    with pytest.raises(UsageError, match="--dtype int8"):
        export_hf(
            str(tmp_path / "adapter"),
            str(tmp_path / "o"),
            ExportOptions(peft=True, hf_config=exported, dtype="int8"),
        )
    with pytest.raises(UsageError, match="--alpha: it is that of an adapter"):
        export_hf(str(RUN), str(tmp_path / "o"), ExportOptions(alpha=3.0))
    with pytest.raises(UnsupportedCheckpointError, match="holds no low-rank adapter"):
        export_hf(str(RUN), str(tmp_path / "o"), ExportOptions(peft=True, hf_config=exported))
    odd = AdapterFolder()
    odd.add(PROJ, (3,), 32, 32)
    odd.add("embedding.word_embeddings.adapter", (), 224, 32)
    with pytest.raises(MappingError) as caught:
        odd_place = odd.save(tmp_path / "odd")
        export_hf(str(odd_place), str(tmp_path / "o"), ExportOptions(peft=True, hf_config=exported))
    assert "decoder.layers.2.self_attention.linear_proj.weight: no rule has this weight" in str(caught.value)
    assert "embedding.word_embeddings.weight: only adapters of linears" in str(caught.value)


@pytest.mark.parametrize("part", ["q", "k", "v", "gate", "up"])
@pytest.mark.parametrize(
    ("settings", "layout", "fits"),
    [
        ({}, None, True),
        ({"rotary_interleaved": True}, None, False),
        ({"glu_interleave": (4, 1)}, None, False),
        ({}, "gate_up_interleaved", False),
    ],
)
def test_a_part_is_a_linear_where_its_rows_keep_their_order(part, settings, layout, fits):
    attention = part in ("q", "k", "v")
    pair: Any = SimpleNamespace(
        rule=SimpleNamespace(layout=layout or ("qkv" if attention else "gate_up")),
        hf=[f"{name}.weight" for name in (("q", "k", "v") if attention else ("gate", "up"))],
        tensors=[SimpleNamespace(shape=(8 + i, 4)) for i in range(3)],
    )
    rows = 8 + ("qkv".index(part) if attention else ["gate", "up"].index(part))
    for size in (rows, rows - 1):
        adapter: Any = SimpleNamespace(part=part, left=SimpleNamespace(shape=(size, 2)))
        if fits and size == rows:
            made = peft_targets._part(adapter, pair, replace(SMALLEST, **settings))
            assert (made.module, made.rows, made.turned) == (part, rows, False)
            continue
        with pytest.raises(MappingError, match="rows" if fits else "not a separate linear"):
            peft_targets._part(adapter, pair, replace(SMALLEST, **settings))
