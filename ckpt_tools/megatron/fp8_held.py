"""Which parameters a running model holds in FP8 (`--fp8-param-gather`): Megatron-FSDP packs them apart from the rest.

Transformer Engine's linear layers hold their weights so when they are built under its FP8 context, which core opens
for every layer but those that stay in bf16 (transformer_block.py, fp8_utils.py `get_fp8_context`). Norms fused into
them, biases, embeddings, routers and the output layer keep the model's type.
"""

from __future__ import annotations

import re

from ckpt_tools.megatron.hybrid import says_hybrid
from ckpt_tools.megatron.keys import decoder_layer, layer_of
from ckpt_tools.megatron.run_state.common_state import CommonState

FP8 = "float8_e4m3fn"
_LINEAR = re.compile(r"(?:linear_\w+|in_proj|out_proj|eh_proj)\.weight\d*")


def is_held_in_fp8(name: str, common: CommonState) -> bool:
    """Whether the live parameter `name` is FP8 in a job with the settings of the run that wrote a checkpoint."""
    arg = common.arg
    if not arg("fp8") or not (arg("fp8_param_gather") or arg("fp8_param")):
        return False
    if arg("transformer_impl") == "local" and not says_hybrid(common.args or common.model_config):
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
