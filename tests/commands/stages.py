"""What pipeline stages of Megatron-FSDP hold: weights under the stage's layer numbers, all else under the model's."""

import re
from typing import Any

import torch

STATE = "optimizer.state.module.module.module."
GROUP = "optimizer.param_to_group_meta.module.module.module."
_LAYER = re.compile(r"(?<=decoder\.layers\.)(\d+)(?=\.)")
_LAST = ("final_layernorm", "output_layer")


def of_stage(
    tensors: dict[str, torch.Tensor], stage: int, layers: int = 1
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and objects of one of two stages, of `layers` layers each."""
    mine: dict[str, torch.Tensor] = {}
    objects: dict[str, Any] = {f"rng_state.({stage}, 0).0.np_rng_state": ("MT19937", stage)}
    for key, value in tensors.items():
        found = _LAYER.search(key)
        here = (
            int(found[1]) // layers == stage if found else any(part in key for part in _LAST) == (stage == 1)
        )
        if not here or key.startswith("rng_state"):
            continue
        name = key
        if key.startswith("model."):
            name = _LAYER.sub(lambda m: str(int(m[1]) % layers), key)
        elif key.endswith(".exp_avg"):
            whole = re.sub(r"_[wv]$", "", key.removeprefix(STATE).removesuffix(".exp_avg"))
            objects |= {f"{GROUP}{whole}.{field}": value for field, value in _FIELDS.items()}
        mine[name] = value
    return mine, objects


_FIELDS = {"lr": 0.1, "weight_decay": 0.01, "step": 2, "bias_correction": True}
