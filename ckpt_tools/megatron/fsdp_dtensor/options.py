"""What a user may decide about an `fsdp_dtensor` output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.megatron.keys import MODEL_PREFIX
from ckpt_tools.model.choices import DialectName, ExpertModules, LayerSpec


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What a user may decide about the target; None leaves the decision to the checkpoint."""

    dialect: DialectName | None = None
    layer_spec: LayerSpec | None = None
    experts: ExpertModules | None = None
    swiglu: bool | None = None
    swiglu_modules: tuple[str, ...] = ()
    rename_mtp: bool = False
    vocab_size_padded: int | None = None  # rows of the vocabulary tensors in the target
    vocab_size: int | None = None  # real tokens; the rest is padding
    tp: int | None = None  # tensor-parallel size of the job that will load the result
    weights_only: bool = False
    dtype: str | None = None  # of the weights, with weights_only
    group_map: Mapping[str, int] | None = None
    strict_map: bool = False
    model_prefix: str = MODEL_PREFIX
    state_prefix: str | None = None
    fresh_optimizer: bool | None = None  # with weights_only: zero moments, step 0
    lr: float | None = None  # of the fresh optimizer, as all below
    min_lr: float | None = None
    weight_decay: float | None = None
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_eps: float | None = None
