"""Masters that are stored chunk by chunk as their weights are: one pass over both can compare them."""

from __future__ import annotations

from ckpt_tools.megatron.keys import canonical_kind, state_key
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.roles import MASTER


def master_pairs(catalog: Catalog) -> dict[Item, Item]:
    """The item of each fp32 master chunk whose bf16 weight has a chunk of the same place, to that chunk's item.

    Names and boxes alone are looked at. Whether the two must round to each other is for the model to say.
    """
    pairs: dict[Item, Item] = {}
    for key, masters in catalog.tensors.items():
        state = state_key(key)
        if state is None or canonical_kind(state.kind) != MASTER:
            continue
        weights = catalog.tensors.get(state.weight)
        if weights is None or (masters.dtype, weights.dtype) != ("float32", "bfloat16"):
            continue
        items = {chunk.box: chunk.item for chunk in weights.chunks}
        pairs |= {c.item: items[c.box] for c in masters.chunks if c.box in items}
    return pairs
