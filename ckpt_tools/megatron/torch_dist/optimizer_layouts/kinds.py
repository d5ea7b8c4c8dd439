"""Which of Megatron's optimizer state layouts a checkpoint uses."""

from __future__ import annotations

from typing import Any

from ckpt_tools.megatron.keys import bucket_key, bucket_object, state_key
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.catalog import Catalog


def optimizer_layout(catalog: Catalog, common: CommonState) -> str:
    """Name of the optimizer layout, told from the keys; what the writer declared decides between look-alikes.

    `none`, `fsdp_dtensor`, `dp_reshardable`, `fully_sharded_bucket_space`, `dp_zero_gather_scatter`,
    `fully_sharded_model_space`, `fully_reshardable` or `non_distributed`.
    """
    declared = declared_layout(common)
    if any(found.what == "param_state" for found in map(bucket_object, catalog.objects) if found):
        return "dp_zero_gather_scatter"
    if any(map(bucket_key, catalog.tensors)):
        return "fully_sharded_bucket_space" if declared == "fully_sharded_bucket_space" else "dp_reshardable"
    states = {found.kind for found in map(state_key, catalog.tensors) if found}
    if "module" in states or not states:
        return "fsdp_dtensor" if states else "none"
    if catalog.original_shapes:
        return "fully_sharded_model_space"
    return "fully_reshardable" if "param" in states else declared or "non_distributed"


def declared_layout(common: CommonState) -> str | None:
    """The sharding type that the writer put into the common state, or None."""
    content = common.values.get("content_metadata")
    declared = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    optimizer: Any = common.values.get("optimizer")
    for part in (optimizer, *(optimizer.values() if isinstance(optimizer, dict) else ())):
        if declared is None and isinstance(part, dict):
            declared = part.get("param_state_sharding_type")
    return declared if isinstance(declared, str) else None
