"""The names of a model's tensors without what programs and wrappers put around them.

A program saves its model inside of dicts (``model.``, ``app.model.``, ``model_state.model.``), and wrappers (DDP,
FSDP, torch.compile, activation checkpointing) add segments of their own, in front of all names or inside of some.
What is in front is not guessed from a list: whoever knows the model's names gives them, and the one prefix is taken
behind which they are found.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.dcp.state_dict import EXTRA_STATE, endings, read_state_dict
from ckpt_tools.model.catalog import Catalog

_INSIDE = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model in a state dict: its tensors by name, all of which stand behind `prefix`.

    `stray` are keys of the same dict that do not stand behind it, `beside` those of other dicts (a data loader, a
    step count), `optimizer` those of optimizers; tensors and objects alike.
    """

    prefix: str
    keys: Mapping[str, str]  # name -> key
    stray: tuple[str, ...]
    beside: tuple[str, ...]
    optimizer: tuple[str, ...]


def without_segments(key: str) -> str:
    """The name without the segments that wrappers put inside of names."""
    return _INSIDE.sub("", key)


def possible_names(catalog: Catalog) -> frozenset[str]:
    """Everything that the tensors of the model may be called."""
    return frozenset(
        name for key in outside_optimizers(catalog)[0] for name in endings(without_segments(key))
    )


def named_model(catalog: Catalog, wanted: Collection[str]) -> NamedModel:
    """The model that most of the `wanted` names are found in."""
    tensors, optimizer = outside_optimizers(catalog)
    held: dict[str, dict[str, str]] = {}  # prefix -> wanted name -> key
    for key in tensors:
        name = without_segments(key)
        found = next((one for one in endings(name) if one in wanted), None)
        if found is not None:
            held.setdefault(name[: len(name) - len(found)], {})[found] = key
    whole = [prefix for prefix, found in held.items() if len(found) == len(wanted)]
    if len(whole) > 1:
        raise MappingError(
            f"{catalog.root} holds the model {len(whole)} times; leave out what is not meant with --ignore-keys "
            "GLOB:\n" + list_problems(f"{prefix}*" for prefix in whole),
            whole,
        )
    prefix = max(held, key=lambda prefix: len(held[prefix]), default="")
    roots = {_root(catalog, key) for key in held.get(prefix, {}).values()}
    keys: dict[str, list[str]] = {}
    stray, beside = list[str](), [key for key in catalog.objects if key not in optimizer]
    for key in tensors:
        name, root = without_segments(key), _root(catalog, key)
        if root is not None and root not in roots:
            beside.append(key)
        elif name.startswith(prefix):
            keys.setdefault(name.removeprefix(prefix), []).append(key)
        else:
            stray.append(key)
    if twice := [" and ".join(found) for found in keys.values() if len(found) > 1]:
        raise MappingError("keys that are one name without their wrappers:\n" + list_problems(twice), twice)
    beside += [key for key in catalog.tensors if key.endswith(EXTRA_STATE) and key not in optimizer]
    names = {name: found[0] for name, found in keys.items()}
    return NamedModel(prefix, names, tuple(stray), tuple(beside), tuple(optimizer))


def outside_optimizers(catalog: Catalog) -> tuple[list[str], dict[str, None]]:
    """The tensors that no optimizer has, and the keys of optimizers."""
    optimizer = dict.fromkeys(key for one in read_state_dict(catalog).optimizers for key in one.all_keys())
    return [k for k in catalog.tensors if k not in optimizer and not k.endswith(EXTRA_STATE)], optimizer


def _root(catalog: Catalog, key: str) -> tuple[str | int, ...] | None:
    """The dicts that a tensor stands in; None: nothing tells."""
    path = catalog.planner_paths.get(key)
    return None if path is None else tuple(path[:-1])
