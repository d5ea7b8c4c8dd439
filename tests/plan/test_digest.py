"""A digest is that of the JSON of everything at once, however it is spelled."""

from __future__ import annotations

import hashlib
import json

import orjson
import pytest

from ckpt_tools.model.transfers import TensorInfo
from ckpt_tools.plan.build import plan_digest


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2500])
def test_tables_are_spelled_in_pieces_as_they_are_at_once(count: int) -> None:
    names = [f'layer.{n}."quoted".ünï' for n in range(count)]
    sizes = {name: number for number, name in enumerate(names)}
    tensors = {name: TensorInfo("float32", (number, 2)) for number, name in enumerate(names)}
    paths = {name: ("model", number, name) for number, name in enumerate(names)}
    shapes = {name: (number,) for number, name in enumerate(names)}
    kinds = {key: tuple(info) for key, info in tensors.items()}
    at_once = orjson.dumps([sizes, kinds, paths, shapes, {}])
    assert plan_digest([], [], sizes, tensors, paths, shapes) == hashlib.sha256(at_once).hexdigest()
    at_once = orjson.dumps([sizes, kinds, paths, {}])
    assert plan_digest([], [], sizes, tensors, paths) == hashlib.sha256(at_once).hexdigest()


def test_a_name_that_is_no_text_has_all_tables_spelled_the_other_way() -> None:
    paths = {f"k{n}": ("k", n) for n in range(1500)} | {"file\udcff": ("file\udcff",)}
    tensors = {"k0": TensorInfo("float32", (2,))}
    at_once = json.dumps([{"f": 1}, {"k0": ["float32", [2]]}, paths, {}]).encode()
    assert plan_digest([], [], {"f": 1}, tensors, paths) == hashlib.sha256(at_once).hexdigest()
