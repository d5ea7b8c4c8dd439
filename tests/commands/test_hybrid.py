"""HybridModel: Transformer Engine's names whatever the args say, and the GPT model that one of its kind is."""

import re

import pytest

from ckpt_tools import (
    ConvertOptions,
    ExportOptions,
    TargetOptions,
    convert_to_fsdp_dtensor,
    export_hf,
    preflight,
)
from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.run_state.settings import settings_of
from tests.commands import oracle
from tests.commands.made import fsdp, torch_dist
from tests.commands.rewritten import Parts, read, write
from tests.folders import content

HYBRID_ARGS = ("is_hybrid_model", "hybrid_layer_pattern", "spec")
FUSED = "model.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def as_gpt(parts: Parts) -> None:
    """The same weights under the names of a GPT model."""

    def name(key: str) -> str:
        found = re.sub(r"layers\.(\d+)\.", lambda m: f"layers.{int(m[1]) // 2}.", key)
        return found.replace("final_norm", "final_layernorm")

    parts.rename(name)
    parts.args["num_layers"] = 2
    parts.args["hybrid_layer_pattern"] = parts.args["spec"] = None
    parts.args["is_hybrid_model"] = False


@pytest.mark.parametrize(
    ("implementation", "told"),
    [("local", ("is_hybrid_model",)), ("transformer_engine", ("hybrid_layer_pattern",)), ("inference_optimized", ()),
     ("local", ())],
)  # fmt: skip
def test_its_names_are_transformer_engines(implementation, told, cases, tmp_path):
    parts = read(cases / "llama_as_hybrid")
    parts.args["transformer_impl"] = implementation
    for name in set(HYBRID_ARGS) - set(told):
        parts.args.pop(name, None)
    source = write(tmp_path / "source", parts)
    made = fsdp(source)
    keys = oracle.tensors(made)
    assert FUSED in keys and not any("input_layernorm" in key for key in keys)
    oracle.assert_same(torch_dist(made), parts.tensors)


def test_a_job_may_say_either_implementation(cases, tmp_path):
    convert_to_fsdp_dtensor(cases / "llama_as_hybrid", tmp_path / "out")
    for implementation in ("local", "transformer_engine"):
        report = preflight(str(tmp_path / "out"), ["--transformer-impl", implementation]).report
        (rule,) = (check for check in report.checks if check.name == "layer-spec")
        assert rule.findings == ()


def test_a_contrary_flag_is_an_error(cases, tmp_path):
    options = ConvertOptions(target=TargetOptions(layer_spec="local"))
    with pytest.raises(MappingError, match="--layer-spec local: a HybridModel"):
        convert_to_fsdp_dtensor(cases / "llama_as_hybrid", tmp_path / "out", options)


@pytest.mark.parametrize(
    "args",
    [
        {"hybrid_override_pattern": "M-M*"},
        {"hybrid_attention_ratio": 0.1},
        {"spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]},
    ],
)
def test_every_way_to_ask_for_one_is_known(args):
    assert settings_of({"transformer_impl": "local"} | args).local_norms is False
    plain = dict.fromkeys(args)
    assert settings_of({"transformer_impl": "local", "hybrid_context_parallel": True} | plain).local_norms


@pytest.mark.parametrize("through", ["torch_dist", "fsdp_dtensor"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_attention_and_mlp_in_turn_are_exported_as_a_gpt_model(through, dtype, cases, tmp_path):
    source = cases / "llama_as_hybrid"
    parts = read(source)
    as_gpt(parts)
    export_hf(write(tmp_path / "gpt", parts), tmp_path / "truth", ExportOptions(dtype=dtype))
    if through == "fsdp_dtensor":
        convert_to_fsdp_dtensor(source, tmp_path / "fsdp")
        source = tmp_path / "fsdp"
    report = export_hf(source, tmp_path / "out", ExportOptions(dtype=dtype))
    assert "a HybridModel of 4 layers '*-*-' is exported as 2 transformer layers" in report.notes
    assert content(tmp_path / "out") == content(tmp_path / "truth")


def swap_last_layers(key: str) -> str:
    return re.sub(r"layers\.([23])\.", lambda m: f"layers.{5 - int(m[1])}.", key)


def test_another_order_of_layers_is_refused_by_its_pattern(cases, tmp_path):
    parts = read(cases / "llama_as_hybrid")
    parts.rename(swap_last_layers)
    parts.args["hybrid_layer_pattern"] = "*--*"
    with pytest.raises(MappingError, match=r"HybridModel of layers '\*--\*', is not a whole nemotron_h"):
        export_hf(write(tmp_path / "a", parts), tmp_path / "out")
    parts.args["hybrid_layer_pattern"] = "*-*-"
    with pytest.raises(
        MappingError, match=r"args say hybrid pattern '\*-\*-', the weights have layers '\*--\*'"
    ):
        export_hf(write(tmp_path / "b", parts), tmp_path / "out")


def test_mamba_layers_are_refused_by_name(cases, tmp_path):
    parts = read(cases / "llama_as_hybrid")
    parts.rename(lambda key: key.replace("layers.2.self_attention.linear_proj", "layers.2.mixer.out_proj"))
    with pytest.raises(
        MappingError, match=r"decoder\.layers\.2: a layer of a HybridModel is .*\['\*', 'M'\]"
    ):
        export_hf(write(tmp_path / "a", parts), tmp_path / "out")
