"""What torch's Adam keeps in a group and Megatron's fused one does not: `write` fills it in, `read` takes it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INITIAL_LR = "initial_lr"  # what torch's schedulers multiply
DECOUPLED = "decoupled_weight_decay"
# Fields of torch.optim.Adam and AdamW beside lr, betas, eps and weight_decay, with their defaults.
ADAM_FIELDS: Mapping[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    DECOUPLED: True,
}
