"""How each part of a region of a target tensor gets there: copied from a stored chunk, or computed by a kernel."""

from __future__ import annotations

from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import TensorEntry, Value
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.transfers import (
    COMPUTED,
    COVERING,
    RUNS,
    VERBATIM,
    Computation,
    Operand,
    Strategy,
    Transfer,
)
from ckpt_tools.model.views import pull_box
from ckpt_tools.plan.byte_runs import is_dense, is_run, read_pattern
from ckpt_tools.plan.overlap import ChunkFinder, Located, TargetReader

SPAN_BYTES = 4 << 20  # longest span assumed when a strategy is chosen


def transfers_into(reader: TargetReader, box: Box) -> list[Transfer | Computation]:
    """What fills `box` (the target's coordinates), in the order of where it begins."""
    found = sorted(reader.locate(box), key=lambda at: at.piece.box.start)
    return [transfer(reader, at, strategy(reader, at, box), box) for at in found]


def strategy(reader: TargetReader, at: Located, box: Box) -> Strategy:
    """How to move a part of `box`: by bytes as its piece lies in its chunk, or by computing."""
    entry = reader.sources[at.source][1]
    if entry.made is not None:
        return COMPUTED
    stored, dtype, piece = entry.dtype, reader.target.dtype, at.piece
    size = piece.box.size
    whole = piece.box.volume == reader.chunk(at).box.volume and is_dense(size, piece.strides)
    if whole and stored == dtype and is_run(piece.box, box.size):
        return VERBATIM
    width = itemsize(stored)
    pattern = read_pattern(size, piece.strides, width, SPAN_BYTES // width)
    return RUNS if pattern.dense(size) else COVERING


def transfer(reader: TargetReader, at: Located, how: Strategy, box: Box) -> Transfer | Computation:
    """The part `at` of `box`, to be moved as `how` says."""
    source, entry = reader.sources[at.source]
    if entry.made is None:
        stored = reader.chunk(at)
        return Transfer(entry.key, stored.item, entry.dtype, stored.box.size, at.piece, how)
    region = at.piece.box
    wanted = pull_box(source.view, region.shift(box.start)).intersect(full_box(entry.shape))
    assert wanted is not None  # `locate` found it
    return Computation(
        entry.key,
        entry.made.kernel,
        entry.dtype,
        entry.shape,
        source.view,
        box.start,
        region,
        _operands(reader.finder, entry, wanted),
    )


def _operands(finder: ChunkFinder, entry: TensorEntry, wanted: Box) -> tuple[Operand, ...]:
    """What the kernel needs of its inputs for `wanted` of a made tensor."""
    assert entry.made is not None  # asked for made tensors only
    inputs = entry.made.inputs
    boxes = entry.made.kernel.needs(wanted, [value.form for value in inputs])
    return tuple(
        _operand(finder, f"{entry.key} (input {number})", value, box)
        for number, (value, box) in enumerate(zip(inputs, boxes, strict=True))
    )


def _operand(finder: ChunkFinder, name: str, value: Value, box: Box) -> Operand:
    tensor = TargetTensor(name, value.dtype, value.shape, value.sources, zero_filled=value.zero_filled)
    transfers = transfers_into(TargetReader(finder, tensor), box)
    covered = sum(part.box.volume for part in transfers)
    return Operand(value.dtype, value.shape, box, tuple(transfers), covered < box.volume)
