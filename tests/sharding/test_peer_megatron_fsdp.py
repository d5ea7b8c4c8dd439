"""The released megatron-fsdp wheel, run beside ours on random models.

`pip install --no-deps --target $CKPT_TOOLS_PEERS/megatron_fsdp-0.6.1 megatron-fsdp==0.6.1`
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ckpt_tools.sharding.parameters import Parameter, Shape
from ckpt_tools.sharding.placement import group_v1, pack_v1, pack_v2, v1_cell
from ckpt_tools.sharding.units import number_units

RELEASE = "megatron_fsdp-0.6.1"
pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def peer() -> Iterator[Any]:
    """The released package, imported from the peers' folder."""
    root = os.environ.get("CKPT_TOOLS_PEERS")
    if root is None:
        pytest.skip("CKPT_TOOLS_PEERS names no folder")
    folder = Path(root) / RELEASE
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that Transformer Engine is not installed
            yield SimpleNamespace(
                v1=importlib.import_module("megatron_fsdp.param_and_grad_buffer"),
                layout=importlib.import_module("megatron_fsdp.experimental.layout"),
            )
    finally:
        sys.path.remove(str(folder))


def random_shape(rng: random.Random) -> Shape:
    dims = rng.choice([1, 2, 2, 2, 3])
    return tuple(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 17, 32]) for _ in range(dims))


def test_v1_packs_as_the_release_does(peer: Any) -> None:
    import torch

    rng = random.Random(11)
    config = SimpleNamespace(data_parallel_sharding_strategy="optim_grads_params")
    compared = 0
    for _ in range(600):
        shapes = sorted((random_shape(rng) for _ in range(rng.randint(1, 12))), key=lambda s: -_row(s))
        packing = pack_v1(shapes, v1_cell(shapes))
        parts = rng.choice([1, 2, 3, 7, 16])
        sizes = [torch.Size(shape) for shape in shapes]
        for part in {0, parts // 2, parts - 1}:
            items, bucket, shard = peer.v1.build_data_parallel_buffer_index(
                sizes, part, parts, True, config, chunk_size_factor=packing.cell
            )
            assert [items[i].global_data_index for i in range(len(shapes))] == list(packing.offsets)
            assert list(items) == list(packing.placed)
            assert bucket.size == packing.size(parts)
            length = packing.size(parts) // parts
            assert (shard.bucket_data_index, shard.size) == (part * length, length)
            compared += 1
    print(f"{compared} index calls equal")
    assert compared > 1000


def test_v1_groups_as_the_release_does(peer: Any) -> None:
    rng = random.Random(12)
    compared = 0
    for _ in range(150):
        module = _random_module(rng)
        unit = type(module.layers[0])
        limit = rng.choice([None, 1, 30, 200])
        policy = peer.v1.BucketingPolicy(limit, [unit], "optim_grads_params")
        groups, _, together = peer.v1._get_parameter_groups(module, policy, {})
        names = {p: name for name, p in module.named_parameters()}
        modules = [path for path, m in module.named_modules() if isinstance(m, unit)]
        parameters = _described(module, modules)
        shapes = [p.shape for p in parameters]
        found = group_v1(parameters, shapes, range(len(parameters)), limit, split_shared=True)
        assert [[parameters[i].name for i in g.members] for g in found] == [
            [names[p] for p in g.params] for g in groups
        ]
        for number, (ours, theirs) in enumerate(zip(found, groups, strict=True)):
            assert v1_cell([shapes[i] for i in ours.members]) == theirs.chunk_size_factor
            assert (ours.unit, ours.is_expert, ours.trainable) == (
                theirs.fsdp_unit_id,
                theirs.is_expert_param,
                theirs.requires_grad,
            )
            same = [i for i, g in enumerate(found) if (g.unit, g.is_expert) == (ours.unit, ours.is_expert)]
            assert together[number] == (same if ours.unit is not None else [number])
            compared += 1
    print(f"{compared} groups equal")
    assert compared > 1000


def test_v2_packs_as_the_release_does(peer: Any) -> None:
    rng = random.Random(13)
    for _ in range(600):
        shapes = [random_shape(rng) for _ in range(rng.randint(1, 12))]
        parts = rng.choice([1, 2, 3, 7, 16])
        theirs = peer.layout.GlobalLayout.build(shapes, parts)
        ours = pack_v2(shapes)
        assert (theirs.tensor_to_offset, theirs.size) == (ours.offsets, ours.size(parts))


def _row(shape: Shape) -> int:
    row = 1
    for n in shape[1:]:
        row *= n
    return row


def _random_module(rng: random.Random) -> Any:
    """A model with layers, experts, frozen, fp32 and shared parameters."""
    import torch

    class Layer(torch.nn.Module):
        pass

    def fill(module: Any, count: int) -> None:
        for i in range(count):
            dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float32])
            p = torch.nn.Parameter(
                torch.empty(random_shape(rng), device="meta", dtype=dtype), rng.random() < 0.9
            )
            if rng.random() < 0.1:
                setattr(p, "shared_embedding", True)  # noqa: B010 - the mark upstream looks for
            module.register_parameter(f"p{i}", p)

    model = torch.nn.Module()
    fill(model, rng.randint(0, 5))
    model.layers = torch.nn.ModuleList()
    for _ in range(rng.randint(1, 3)):
        layer = Layer()
        fill(layer, rng.randint(1, 5))
        layer.experts = torch.nn.ModuleList([torch.nn.Module() for _ in range(rng.randint(0, 2))])
        for expert in layer.experts:
            fill(expert, rng.randint(1, 3))
        model.layers.append(layer)
    return model


def _described(module: Any, units: list[str]) -> list[Parameter]:
    named = list(module.named_parameters())
    owners = number_units([name for name, _ in named], units)
    return [
        Parameter(
            name,
            tuple(p.shape),
            str(p.dtype),
            is_expert=".experts." in name,
            unit=unit,
            trainable=p.requires_grad,
            shared_embedding=getattr(p, "shared_embedding", False),
        )
        for (name, p), unit in zip(named, owners, strict=True)
    ]


def test_the_peer_is_the_release_it_claims_to_be(peer: Any) -> None:
    assert isinstance(peer.v1, ModuleType)
    assert sys.modules["megatron_fsdp"].__version__ == RELEASE.rpartition("-")[2]
