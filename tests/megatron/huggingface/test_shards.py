"""Shards are cut where huggingface_hub cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.commands.huggingface.folder import pack_shards, shard_index


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 50))
def test_same_cuts_as_huggingface_hub(sizes: list[int], limit: int) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the optional peer huggingface_hub is not installed")
    from huggingface_hub.serialization._base import split_state_dict_into_shards_factory

    assert hub
    names = {f"t{i}": size for i, size in enumerate(sizes)}
    theirs = split_state_dict_into_shards_factory(
        names, get_storage_size=lambda t: t, get_storage_id=lambda t: None,
        filename_pattern="model{suffix}.safetensors", max_shard_size=limit,
    )  # fmt: skip
    ours = pack_shards(names.items(), limit)
    assert {shard.file: list(shard.keys) for shard in ours} == theirs.filename_to_tensors
    index = shard_index(ours, names)
    assert index["metadata"] == {"total_size": sum(sizes)} == theirs.metadata
    if theirs.is_sharded:
        assert index["weight_map"] == theirs.tensor_to_filename
