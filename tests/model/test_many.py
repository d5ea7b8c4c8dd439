"""The dataclasses that are made by the hundred thousand are what frozen ones are, but for refused assignments."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source

_MADE = TargetTensor("model.w", "float32", (2, 3), (Source("w"),), parameter="w")


def test_equal_ones_hash_alike_are_pickled_and_replaced() -> None:
    equal = TargetTensor("model.w", "float32", (2, 3), (Source("w"),), parameter="w")
    assert equal == _MADE and equal is not _MADE and {equal} == {_MADE}
    assert pickle.loads(pickle.dumps(_MADE)) == _MADE
    other = replace(_MADE, shape=(3, 2))
    assert other != _MADE and (other.shape, other.key) == ((3, 2), "model.w")


def test_they_hold_their_fields_alone() -> None:
    assert not hasattr(_MADE, "__dict__")
    assert TargetTensor.__slots__ == tuple(field.name for field in fields(TargetTensor))
