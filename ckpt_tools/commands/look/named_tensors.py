"""The tensors of a checkpoint of any format, each with the parameter, the layer and the role that it has.

Where a reader makes a `Model` of the checkpoint, tensors are its values: one a parameter, layer, expert and role,
also where a file holds all layers in one tensor or an optimizer holds everything in flat buffers. Of other
checkpoints, and of those that no model can be made of, tensors are the stored ones under their keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ckpt_tools.commands.huggingface.folder import CONFIG, read_config
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.read_model import READ, Wanted, read_model
from ckpt_tools.errors import NEVER_FINDINGS, CkptError, UsageError
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.huggingface.quantization.quantized import SETTINGS, dequantized
from ckpt_tools.megatron.keys import Part, one_expert, part_of
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.model.model import Model
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source

KEYS, PARAMETERS = "keys", "parameters"


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One value of a parameter, or a stored tensor; `tensor` reads it."""

    name: str
    part: Part
    role: str
    tensor: TargetTensor
    expert: int | None = None
    keys: tuple[str, ...] = ()  # of the stored tensors that it is read from

    @property
    def title(self) -> str:
        """The name, with the expert's number."""
        return one_expert(self.name, self.expert)


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """All tensors of a checkpoint under one kind of name, layer by layer; `catalog` has what they are read from."""

    by: str
    catalog: Catalog
    tensors: tuple[NamedTensor, ...]
    notes: tuple[str, ...] = ()


def named_tensors(opened: Opened, by: str = "auto", workers: int | None = 1) -> NamedTensors:
    """The tensors by `parameters`, by `keys`, or by the first of them that the checkpoint can be read by.

    `workers` as those of `Wanted`.
    """
    kind = opened.location.kind
    if by == PARAMETERS and kind not in READ:
        raise UsageError(
            f"--by parameters: {opened.location.path} is {kind}, which names tensors by keys alone"
        )
    if by == KEYS or kind not in READ:
        return _by_keys(opened)
    try:
        model = read_model(opened, Wanted(unknown_keys=True, workers=workers))
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        if by == PARAMETERS:
            raise
        found = _by_keys(opened)
        first = str(error).partition("\n")[0]
        return replace(
            found, notes=(*found.notes, f"tensors are those that are stored, not parameters: {first}")
        )
    notes = (*model.notes, *([model.unread] if model.unread else []))
    return NamedTensors(PARAMETERS, model.catalog, in_layer_order(_values(model)), notes)


def in_layer_order(tensors: Iterable[NamedTensor]) -> tuple[NamedTensor, ...]:
    """Layer by layer, blocks and what is in a layer as they come first."""
    tensors = tuple(tensors)
    blocks = {block: i for i, block in enumerate(dict.fromkeys(t.part.block for t in tensors))}
    leaves = {leaf: i for i, leaf in enumerate(dict.fromkeys((t.part.block, t.part.leaf) for t in tensors))}

    def place(t: NamedTensor) -> tuple[int, int, int, int]:
        layer = -1 if t.part.layer is None else t.part.layer
        return (
            blocks[t.part.block],
            layer,
            leaves[t.part.block, t.part.leaf],
            -1 if t.expert is None else t.expert,
        )

    return tuple(sorted(tensors, key=place))


def _values(model: Model) -> Iterator[NamedTensor]:
    for parameter in model.parameters:
        part = part_of(parameter.name)
        for role, value in parameter.values.items():
            tensor = TargetTensor(
                parameter.name, value.dtype, value.shape, value.sources, zero_filled=value.zero_filled
            )
            stored = [key for source in value.sources for key in model.catalog.stored_keys(source.key)]
            keys = tuple(dict.fromkeys(stored))
            yield NamedTensor(parameter.name, part, role, tensor, parameter.expert, keys)


def _by_keys(opened: Opened) -> NamedTensors:
    catalog, left_out, notes = _plain(opened)
    of = FORMATS[opened.location.kind]
    roles, parameters = of.roles(catalog), of.parameters(catalog)

    def named(key: str, entry: TensorEntry) -> NamedTensor:
        tensor = TargetTensor(key, entry.dtype, entry.shape, (Source(key),))
        keys = tuple(dict.fromkeys(catalog.stored_keys(key)))
        return NamedTensor(key, part_of(parameters.get(key, key)), roles[key], tensor, keys=keys)

    found = (named(key, entry) for key, entry in catalog.tensors.items() if key not in left_out)
    return NamedTensors(KEYS, catalog, in_layer_order(found), notes)


def _plain(opened: Opened) -> tuple[Catalog, frozenset[str], tuple[str, ...]]:
    """The catalog, with what a quantized Hugging Face model's codes and scales stand for in their place."""
    catalog, nothing = opened.catalog, frozenset[str]()
    if opened.location.kind != "safetensors" or not opened.files.exists(CONFIG):
        return catalog, nothing, ()
    try:
        config = read_config(opened.location.path)
        if SETTINGS not in config:
            return catalog, nothing, ()
        plain = dequantized(catalog, config, opened.files)
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        first = str(error).partition("\n")[0]
        return catalog, nothing, (f"codes and scales are shown as they are stored: {first}",)
    return plain.catalog, plain.parts, plain.notes
