"""The few training settings that decide a conversion, from Megatron's `args` or Bridge's `run_config.yaml`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.errors import UsageError, raise_if
from ckpt_tools.formats.pickle.unpickle import TorchDtype
from ckpt_tools.megatron.hybrid import says_hybrid
from ckpt_tools.megatron.keys import decoder_layer, layer_of
from ckpt_tools.megatron.run_state.common_state import CommonState


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What the writer's own settings say; None where they are silent."""

    swiglu: bool | None = None
    local_norms: bool | None = None
    hybrid: bool = False  # a HybridModel: never with local norms
    grouped_experts: bool | None = None
    fused_mla_down: bool = False
    half_precision: bool | None = None  # trained in bf16 or fp16, so each weight has an fp32 master
    num_layers: int | None = None
    tp: int | None = None
    bridge: bool = False
    fp8_recipe: str | None = "unknown"  # of weights that may be in FP8 (`--fp8-param-gather`); None: none are


def read_settings(common: CommonState) -> ModelSettings:
    """Settings of the run that wrote a checkpoint; nothing is known when it kept neither args nor a configuration."""
    if common.args:
        return settings_of(common.args)
    return settings_of(common.model_config, bridge=True) if common.model_config else ModelSettings()


def settings_of(settings: Mapping[str, Any], bridge: bool = False) -> ModelSettings:
    """Settings of Megatron-LM's `args`, or of the `model` section of a Megatron-`bridge` `run_config.yaml`."""
    get = settings.get
    hybrid, implementation = says_hybrid(settings), get("transformer_impl")
    is_fp8 = any(map(get, ("fp8", "fp8_param", "fp8_param_gather")))
    return ModelSettings(
        swiglu=_swiglu_of_bridge(settings) if bridge else _maybe_bool(get("swiglu")),
        local_norms=False if hybrid else None if implementation is None else implementation == "local",
        hybrid=hybrid,
        grouped_experts=_maybe_bool(get("moe_grouped_gemm")),
        fused_mla_down=bool(get("mla_down_proj_fusion")),
        half_precision=None
        if get("bf16") is None and get("fp16") is None
        else bool(get("bf16") or get("fp16")),
        num_layers=get("num_layers"),
        tp=get("tensor_model_parallel_size"),
        bridge=bridge,
        fp8_recipe=str(get("fp8_recipe") or "delayed") if is_fp8 else None,
    )


def _swiglu_of_bridge(model: Mapping[str, Any]) -> bool | None:
    """Bridge splits fc1 only for a gated unit with silu as activation (training/checkpointing.py)."""
    gated, activation = model.get("gated_linear_unit"), model.get("activation_func")
    target = activation.get("_target_", "") if isinstance(activation, Mapping) else str(activation or "")
    is_silu = target.rpartition(".")[2].lower() in ("silu", "swish")
    return None if gated is None else bool(gated) and is_silu


def training_dtype(common: CommonState) -> str | None:
    """Element type of the running model's parameters, None when nothing names it."""
    return _params_dtype(common) or _flagged_dtype(common)


def contradicted_dtype(common: CommonState) -> str | None:
    """How `params_dtype` contradicts the flags that Megatron makes it of; a wider one than theirs does not."""
    named, flagged = _params_dtype(common), _flagged_dtype(common)
    if named not in ("bfloat16", "float16") or flagged in (None, named):
        return None
    return f"params_dtype is {named}, bf16 {common.arg('bf16')} and fp16 {common.arg('fp16')}"


def _params_dtype(common: CommonState) -> str | None:
    value = common.arg("params_dtype")
    if isinstance(value, TorchDtype):
        return value.name
    if isinstance(value, Mapping):
        value = value.get("_target_")
    if isinstance(value, str):
        return value.removeprefix("torch.")
    return None


def _flagged_dtype(common: CommonState) -> str | None:
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if common.arg(flag):
            return dtype
    return "float32" if common.arg("bf16") is False else None


def _maybe_bool(value: object) -> bool | None:
    return None if value is None else bool(value)


FP8 = "float8_e4m3fn"
_LINEAR = re.compile(r"(?:linear_\w+|in_proj|out_proj|eh_proj)\.weight\d*")


def is_held_in_fp8(name: str, common: CommonState) -> bool:
    """Whether the live parameter `name` is FP8 in a job with the settings of the run that wrote a checkpoint.

    With `--fp8-param-gather` Megatron-FSDP packs such parameters apart from the rest. Transformer Engine's linear
    layers hold their weights so when they are built under its FP8 context, which core opens for every layer but those
    that stay in bf16 (transformer_block.py, fp8_utils.py `get_fp8_context`). Norms fused into them, biases,
    embeddings, routers and the output layer keep the model's type.
    """
    arg = common.arg
    if not arg("fp8") or not (arg("fp8_param_gather") or arg("fp8_param")):
        return False
    if arg("transformer_impl") == "local" and not says_hybrid(common.settings):
        return False
    layer = layer_of(name)
    if layer is None or not _LINEAR.fullmatch(".".join(name.split(".")[-2:])):
        return False
    return not _stays_in_bf16(name, common)


def _stays_in_bf16(name: str, common: CommonState) -> bool:
    """Whether a parameter is of the decoder's first or last layers that are kept out of FP8."""
    layer, count = decoder_layer(name), common.arg("num_layers")
    if layer is None or not common.arg("first_last_layers_bf16"):
        return False
    first = common.arg("num_layers_at_start_in_bf16", 1)
    last = common.arg("num_layers_at_end_in_bf16", 1)
    return layer[0] < first or (isinstance(count, int) and layer[0] >= count - last)


Setting = Callable[[str], Any]
_DELTA_NET, _MIXER = "self_attention.A_log", "mixer.A_log"
_COUNTED = {  # by the tensor that a layer of the kind has: of what each rank gets as many
    _DELTA_NET: (("linear_num_key_heads", "key heads of a gated delta net"),
                 ("linear_num_value_heads", "value heads of a gated delta net")),
    _MIXER: (("mamba_num_heads", "heads of a Mamba mixer"), ("mamba_num_groups", "groups of a Mamba mixer")),
}  # fmt: skip


def tensor_parallel_problems(tp: int, setting: Setting, names: Iterable[str]) -> Iterator[str]:
    """Why a job of `tp` tensor-parallel ranks cannot be: by its settings, and the names of the model's weights.

    Heads and groups do not show in a tensor's shape: `linear_qkv` of 4 heads has rows enough for 8 ranks, and a job
    of 8 stops before it loads anything (transformer_config.py `__post_init__`; of mixers, ssm/mamba_mixer.py).
    """
    heads, groups = count_of(setting("num_attention_heads")), count_of(setting("num_query_groups"))
    if setting("group_query_attention") is False:
        groups = heads
    if heads and heads % tp:
        yield f"{heads} attention heads are not a multiple of tensor parallel size {tp}"
    if groups and groups != heads and groups % tp and tp % groups:
        yield f"{groups} query groups are neither a multiple nor a divisor of tensor parallel size {tp}"
    kinds = {kind for name in names for kind in _COUNTED if name.endswith(kind)}
    for kind in sorted(kinds):
        for counted, what in _COUNTED[kind]:
            number = count_of(setting(counted))
            if number and number % tp:
                yield f"{number} {what} are not a multiple of tensor parallel size {tp}"


def refuse_tensor_parallel(tp: int, setting: Setting, names: Iterable[str]) -> None:
    problems = tensor_parallel_problems(tp, setting, names)
    what = f"no job of tensor parallel size {tp} can load this model"
    raise_if(problems, UsageError, what, "Give the size of one that can with --tp")


def count_of(value: object) -> int | None:
    """A setting that counts something; None where it is not a whole number above 0."""
    return value if type(value) is int and value > 0 else None
