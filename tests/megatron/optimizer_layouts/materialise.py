"""Reads what sources show, with numpy and without the engine: the oracle side of the layout tests."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import find_tensor
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import OptimizerStates
from ckpt_tools.megatron.torch_dist.stacking import Slice
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.views import Select, Source, chunk_piece, push_piece, view_shape

Bits = npt.NDArray[np.unsignedinteger]


def read_sources(
    files: Files, catalog: Catalog, states: OptimizerStates | None, sources: Iterable[Source]
) -> Bits:
    """The tensor that the sources tile, as bit patterns; every element must be shown exactly once."""
    out: Bits | None = None
    seen: npt.NDArray[np.int8] | None = None
    for source in sources:
        entry = _entry(catalog, states, source.key)
        if out is None or seen is None:
            shape = view_shape(source.view, entry.shape)
            out, seen = np.zeros(shape, f"<u{itemsize(entry.dtype)}"), np.zeros(shape, np.int8)
        assert view_shape(source.view, entry.shape) == out.shape
        for chunk in entry.chunks:
            pieces = push_piece(source.view, chunk_piece(chunk.box))
            if not pieces:
                continue
            payload = _payload(files, entry.dtype, chunk.item)
            for piece in pieces:
                steps = tuple(s * payload.itemsize for s in piece.strides)
                where = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
                out[where] = np.ndarray(
                    piece.box.size, payload.dtype, payload, piece.offset * payload.itemsize, steps
                )
                seen[where] += 1
    assert out is not None and seen is not None
    assert (seen == 1).all()
    return out


def read_weight(files: Files, catalog: Catalog, parameter: Slice) -> Bits:
    """One slice of a stored weight."""
    view = tuple(Select(0, i) for i in parameter.lead)
    return read_sources(files, catalog, None, (Source(parameter.key, view),))


def _entry(catalog: Catalog, states: OptimizerStates | None, key: str) -> TensorEntry:
    return catalog.tensors[key] if key in catalog.tensors else states.payloads[key]  # type: ignore[union-attr]


def _payload(files: Files, dtype: str, item: object) -> Bits:
    offset, length = item.offset, item.length  # type: ignore[attr-defined]
    if not item.bare:  # type: ignore[attr-defined]
        frame = find_tensor(files, item)  # type: ignore[arg-type]
        assert frame.is_row_major and frame.dtype == dtype
        offset, length = frame.payload_offset, frame.nbytes
    return np.frombuffer(files.read(item.file, offset, length), f"<u{itemsize(dtype)}")  # type: ignore[attr-defined]
