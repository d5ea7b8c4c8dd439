"""The few training settings that decide a conversion, from Megatron's `args` or Bridge's `run_config.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.formats.pickle.unpickle import TorchDtype
from ckpt_tools.megatron.hybrid import says_hybrid
from ckpt_tools.megatron.run_state.common_state import CommonState


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What the writer's own settings say; None where they are silent."""

    swiglu: bool | None = None
    local_norms: bool | None = None
    hybrid: bool = False  # a HybridModel: never with local norms
    grouped_experts: bool | None = None
    fused_mla_down: bool = False
    half_precision: bool | None = None  # trained in bf16 or fp16, so an fp32 master stands beside each weight
    num_layers: int | None = None
    tp: int | None = None
    bridge: bool = False
    fp8_recipe: str | None = "unknown"  # of weights that may be in FP8 (`--fp8-param-gather`); None: none are


def read_settings(common: CommonState) -> ModelSettings:
    """Settings of the run that wrote a checkpoint; nothing is known when it kept neither args nor a configuration."""
    if common.args:
        return settings_from_args(common.args)
    if common.model_config:
        return settings_from_model_config(common.model_config)
    return ModelSettings()


def settings_from_args(args: Mapping[str, Any]) -> ModelSettings:
    """Settings of a Megatron-LM `args` namespace, given as a mapping."""
    bf16, fp16 = args.get("bf16"), args.get("fp16")
    return ModelSettings(
        swiglu=_maybe_bool(args.get("swiglu")),
        local_norms=_local_norms(args),
        hybrid=says_hybrid(args),
        grouped_experts=_maybe_bool(args.get("moe_grouped_gemm")),
        fused_mla_down=bool(args.get("mla_down_proj_fusion")),
        half_precision=None if bf16 is None and fp16 is None else bool(bf16 or fp16),
        num_layers=args.get("num_layers"),
        tp=args.get("tensor_model_parallel_size"),
        fp8_recipe=_fp8_recipe(args),
    )


def settings_from_model_config(model: Mapping[str, Any]) -> ModelSettings:
    """Settings of the `model` section of a Megatron-Bridge `run_config.yaml`.

    Bridge splits fc1 only for a gated unit whose activation is silu (training/checkpointing.py).
    """
    gated, activation = model.get("gated_linear_unit"), model.get("activation_func")
    target = activation.get("_target_", "") if isinstance(activation, Mapping) else str(activation or "")
    bf16, fp16 = model.get("bf16"), model.get("fp16")
    return ModelSettings(
        swiglu=None
        if gated is None
        else bool(gated) and target.rpartition(".")[2].lower() in ("silu", "swish"),
        local_norms=_local_norms(model),
        hybrid=says_hybrid(model),
        grouped_experts=_maybe_bool(model.get("moe_grouped_gemm")),
        fused_mla_down=bool(model.get("mla_down_proj_fusion")),
        half_precision=None if bf16 is None and fp16 is None else bool(bf16 or fp16),
        num_layers=model.get("num_layers"),
        tp=model.get("tensor_model_parallel_size"),
        bridge=True,
        fp8_recipe=_fp8_recipe(model),
    )


def training_dtype(common: CommonState) -> str | None:
    """Element type of the running model's parameters, None when nothing names it."""
    value = common.arg("params_dtype")
    if isinstance(value, TorchDtype):
        return value.name
    if isinstance(value, Mapping):
        value = value.get("_target_")
    if isinstance(value, str):
        return value.removeprefix("torch.")
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if common.arg(flag):
            return dtype
    return "float32" if common.arg("bf16") is False else None


def _maybe_bool(value: object) -> bool | None:
    return None if value is None else bool(value)


def _fp8_recipe(settings: Mapping[str, Any]) -> str | None:
    """The recipe of a run that computes in FP8: what decides is whether its weights are FP8 numbers."""
    if any(settings.get(name) for name in ("fp8", "fp8_param", "fp8_param_gather")):
        return str(settings.get("fp8_recipe") or "delayed")
    return None


def _local_norms(settings: Mapping[str, Any]) -> bool | None:
    if says_hybrid(settings):
        return False
    implementation = settings.get("transformer_impl")
    return None if implementation is None else implementation == "local"
