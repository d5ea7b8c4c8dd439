"""Masters of the precision-aware optimizer, kept as what the bf16 weight lacks of them.

With `--use-precision-aware-optimizer` Transformer Engine's fused Adam keeps the low 16 bits of every fp32 master; the
high ones are the weight's own. Layouts that copy the optimizer's memory store them as int16. `fully_reshardable` goes
through fp32 buffers and stores the same numbers as float32, under the key and in the type of plain masters, and no
argument says which of the two they are (`store_param_remainders` has none). So the numbers say it: plain masters
round to their weights, remainders are whole 16-bit numbers, and what could be both is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.errors import MappingError, VerificationError, list_problems
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import SAMPLE, Reader, round_bits
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import OptimizerStates, StateTensor
from ckpt_tools.model.box import Box, row_major_strides
from ckpt_tools.model.catalog import Catalog, Chunk, Made, TensorEntry, Value, made_entry
from ckpt_tools.model.kernels.kernel import JoinRemainder
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.views import Select, Source

if TYPE_CHECKING:
    from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import Bits

STORED = "int16"  # what only remainders are stored as


def joined_masters(
    files: Files, catalog: Catalog, common: CommonState, states: OptimizerStates
) -> OptimizerStates:
    """The states with every master that is stored as a remainder joined with its weight, to be computed when read."""
    masters = {key: state for (kind, key), state in states.states.items() if kind == MASTER}
    encoded = {key for key, state in masters.items() if state.dtype == STORED}
    if states.layout == "fully_reshardable" and common.arg("use_precision_aware_optimizer"):
        encoded |= _told_by_content(files, catalog, masters)
    if not encoded:
        return states
    payloads, joined = dict(states.payloads), dict(states.states)
    for key in encoded:
        weight, state = catalog.tensors[key], masters[key]
        try:
            joined[MASTER, key] = _joined(weight, state, payloads)
        except ValueError as error:
            raise MappingError(f"the master of {key} cannot be joined: {error}") from None
    return replace(states, states=joined, payloads=payloads)


def _joined(weight: TensorEntry, state: StateTensor, made: dict[str, TensorEntry]) -> StateTensor:
    """The master of `weight` as a tensor, or tensors of its slices, that are computed; they are added to `made`."""
    sources = state.slices if state.whole is None else {(): (state.whole,)}
    whole: dict[tuple[int, ...], tuple[Source, ...]] = {}
    for lead, parts in sources.items():
        key = f"master of {weight.key}{list(lead) if lead else ''}"
        shape = weight.shape[len(lead) :]
        own = Source(weight.key, tuple(Select(0, index) for index in lead))
        inputs = (Value(weight.dtype, shape, (own,)), Value(state.dtype, shape, parts))
        made[key] = made_entry(key, Made(JoinRemainder(state.dtype), inputs))
        whole[lead] = (Source(key),)
    if state.whole is not None:
        return StateTensor("float32", whole=whole[()][0])
    return StateTensor("float32", slices=whole)


class _Reading(NamedTuple):
    """What the numbers of one tensor can be, as far as they were looked at."""

    masters: bool
    remainders: bool


def _told_by_content(files: Files, catalog: Catalog, masters: Mapping[str, StateTensor]) -> set[str]:
    """The weights with remainders in the place of float32 masters.

    What is neither stays a master, which the proof of masters will find damaged (or its weight held in FP8). Every
    number is looked at once more where it is used: joining refuses what is not a remainder.
    """
    reader = Reader(files)
    readings: dict[str, _Reading] = {}
    for key, state in masters.items():
        weight = catalog.tensors[key]
        if weight.dtype == "bfloat16" and state.dtype == "float32" and state.whole is not None:
            readings[key] = _reading(reader, catalog.tensors[state.whole.key], weight)
    encoded = {key for key, reading in readings.items() if reading.remainders and not reading.masters}
    plain = {key for key, reading in readings.items() if not reading.remainders}
    both = set(readings) - encoded - plain
    if both and bool(encoded) == bool(plain):
        raise VerificationError(
            "the args say --use-precision-aware-optimizer, and these numbers can be fp32 masters as well as the "
            f"remainders that it stores in their place:\n{list_problems(sorted(both))}\n"
            "Nothing was converted, because a wrong master would not be noticed in training; --weights-only converts "
            "the stored weights.",
            sorted(both),
        )
    return encoded | (both if encoded else set())


def _reading(reader: Reader, state: TensorEntry, weight: TensorEntry) -> _Reading:
    import numpy as np

    masters = remainders = True
    for bits, own in _samples(reader, state, weight):
        numbers = bits.view("<f4")
        whole = np.isfinite(numbers) & (numbers == np.rint(numbers))
        remainders = remainders and bool((whole & (numbers >= -(1 << 15)) & (numbers < 1 << 15)).all())
        masters = masters and bool((round_bits(bits, "float32", "bfloat16") == own).all())
    return _Reading(masters, remainders)


def _samples(reader: Reader, state: TensorEntry, weight: TensorEntry) -> Iterator[tuple[Bits, Bits]]:
    """Bit patterns of a state and of its weight in a part of the first, middle and last row of every chunk."""
    for chunk in state.chunks:
        box = chunk.box
        if box.is_empty:
            continue
        rows = box.volume // box.size[-1] if box.size else 1
        for row in sorted({0, rows // 2, rows - 1}):
            start = tuple(a + i for a, i in zip(box.start, _index(row, box.size), strict=True))
            point = Box(start, (1,) * len(start))
            other = next(c for c in weight.chunks if c.box.contains(point))
            ends = [c.box.stop[-1] - start[-1] if start else 1 for c in (chunk, other)]
            count = min(SAMPLE, *ends)
            yield _run(reader, state, chunk, start, count), _run(reader, weight, other, start, count)


def _index(row: int, size: tuple[int, ...]) -> tuple[int, ...]:
    """The first element of a row of a box of `size`, in coordinates of the box."""
    index = [0] * len(size)
    for axis in range(len(size) - 2, -1, -1):
        row, index[axis] = divmod(row, size[axis])
    return tuple(index)


def _run(reader: Reader, entry: TensorEntry, chunk: Chunk, start: tuple[int, ...], count: int) -> Bits:
    """`count` elements of a chunk along the last axis from the global index `start` on."""
    strides = row_major_strides(chunk.box.size)
    at = sum((a - b) * s for a, b, s in zip(start, chunk.box.start, strides, strict=True))
    return reader.chunk(chunk, entry.dtype, at, count)
