"""A nested Python value as the leaves DCP stores, each under its dotted key.

The rule of `torch.distributed.checkpoint._traverse`: mappings are always descended; lists only when they hold,
at any depth, a tensor or a mapping; everything else, tuples included, is a leaf. Empty mappings vanish. A list
index is an integer in the path and its decimal text in the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from ckpt_tools.formats.torch_archive.item_reader import StoredTensor
from ckpt_tools.model.target import InlineTensor, TargetObject

Path: TypeAlias = tuple[str | int, ...]


def flatten(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """(path, leaf) of everything below `value`, which itself stands at `path`."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from flatten(child, (*path, key if isinstance(key, int) else str(key)))
    elif isinstance(value, list) and any(_has_tensor_or_mapping(child) for child in value):
        for index, child in enumerate(value):
            yield from flatten(child, (*path, index))
    else:
        yield path, value


def _has_tensor_or_mapping(value: object) -> bool:
    if isinstance(value, list):
        return any(_has_tensor_or_mapping(child) for child in value)
    return isinstance(value, Mapping | StoredTensor)


def unflatten(found: Mapping[Path, object]) -> Any:
    """The value whose leaves these are: the inverse of `flatten`, but for the empty mappings that vanish there.

    A node whose keys are the integers from 0 on is a list.
    """
    if set(found) == {()}:
        return found[()]
    children: dict[str | int, dict[Path, object]] = {}
    for path, leaf in found.items():
        children.setdefault(path[0], {})[path[1:]] = leaf
    nested = {key: unflatten(below) for key, below in children.items()}
    if nested and set(nested) == set(range(len(nested))):
        return [nested[index] for index in range(len(nested))]
    return nested


def dotted(path: Path) -> str:
    """The key DCP gives a path."""
    return ".".join(map(str, path))


def leaves(value: object, path: Path) -> tuple[list[InlineTensor], list[TargetObject]]:
    """The leaves of `value` as items to write: tensors inline, everything else as objects."""
    tensors, objects = [], []
    for leaf_path, leaf in flatten(value, path):
        key = dotted(leaf_path)
        if isinstance(leaf, StoredTensor):
            tensors.append(InlineTensor(key, leaf.dtype, leaf.shape, leaf.data, leaf_path))
        else:
            objects.append(TargetObject(key, leaf, leaf_path))
    return tensors, objects
