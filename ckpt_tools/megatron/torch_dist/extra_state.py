"""Keys of the `_extra_state` objects that a model asks for when it loads a `torch_dist` checkpoint.

Linear modules of every layer spec have one; Transformer Engine's attention and norms too. With Megatron's default
strictness an object that is asked for and absent is fatal, while one that nobody asks for is ignored, so the
keys here are a superset of what any version of Transformer Engine has. `None` is what modules without FP8
store, and every version takes it for "nothing to restore".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from ckpt_tools.megatron.keys import is_of_transformers, shard_key
from ckpt_tools.megatron.torch_dist.stacking import Stack

_LINEAR = re.compile(
    r"^(?P<module>.*\.(?:linear_\w+|in_proj|out_proj|eh_proj|fc[12]_latent_proj))\.weight(?:\.\w+)?$"
)
_NORM = re.compile(r"^(?P<module>.*(?:norm|\.ln_\w+))\.weight$")
_HYBRID_END = re.compile(r"^(?P<model>(?:.*\.)?)decoder\.final_norm\.weight$")
_ATTENTION = re.compile(r"^(?P<module>.*(?:self|cross)_attention)\.linear_proj\.weight$")


def extra_state_keys(stacks: Iterable[Stack], transformer_engine: bool) -> tuple[str, ...]:
    """One key per module and (layer, expert) index; with `transformer_engine` those of its own modules too."""
    modules: dict[str, tuple[int, ...]] = {}
    for stack in stacks:
        for module in _modules(stack.key, transformer_engine):
            modules[module] = stack.lead or (1,)
    return tuple(
        shard_key(f"{module}._extra_state", index, lead)
        for module, lead in modules.items()
        for index in itertools.product(*map(range, lead))
    )


def _modules(key: str, transformer_engine: bool) -> Iterable[str]:
    if is_of_transformers(key):
        return
    if match := _LINEAR.match(key):
        yield match["module"]
    if match := _HYBRID_END.match(key):  # MambaModel asks for what GPTModel leaves out, tied or not
        yield f"{match['model']}output_layer"
    if transformer_engine:
        if match := _NORM.match(key):
            yield match["module"]
        if match := _ATTENTION.match(key):
            yield f"{match['module']}.core_attention"
