"""A plan: every byte's way from a source checkpoint to the files of a target, as plain data.

It is made from metadata alone, holds neither paths of this machine nor handles, is the same on every rank, and
can be printed, priced, compared by `digest` and carried out by any number of workers without changing a byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.kernels.kernel import Zeros
from ckpt_tools.model.views import Piece, View

if TYPE_CHECKING:
    from ckpt_tools.model.kernels.kernel import Kernel

Strategy: TypeAlias = Literal["verbatim", "runs", "covering", "computed"]
VERBATIM: Final = "verbatim"  # a whole payload: as it lies: shared or copied, its CRC-32 kept
RUNS: Final = "runs"  # contiguous runs of 64 KiB or more, or all that is needed
COVERING: Final = "covering"  # short runs: covering spans are read and strided copies taken from them
COMPUTED: Final = "computed"  # by a kernel, a tile at a time


class Transfer(NamedTuple):
    """A piece of one source chunk -> a region of one output item.

    `piece.box` is relative to the item's start; `piece.offset` and `piece.strides` are elements of the
    chunk's payload, which is row-major of `shape`.
    """

    key: str  # source tensor
    item: Item
    dtype: str
    shape: tuple[int, ...]
    piece: Piece
    strategy: Strategy

    @property
    def box(self) -> Box:
        """The region, relative to the item's start."""
        return self.piece.box

    @property
    def nbytes(self) -> int:
        """Source bytes wanted."""
        return self.piece.box.volume * itemsize(self.dtype)


class Operand(NamedTuple):
    """What a computation needs of one input of its kernel: `box` of it, filled by transfers as an item is."""

    dtype: str
    shape: tuple[int, ...]  # of the whole input
    box: Box  # in the input's coordinates; those of `transfers` begin at its start
    transfers: tuple[Transfer | Computation, ...]
    zeros: bool  # some elements come from no transfer


class Computation(NamedTuple):
    """A region of one output item that a kernel computes.

    `view` shows the made tensor, of `shape`, in the coordinates of the target tensor, in which the item begins at
    `origin`. Any part of the region pulled back through it says which part of the made tensor has to be computed.
    """

    key: str  # made tensor
    kernel: Kernel
    dtype: str
    shape: tuple[int, ...]
    view: View
    origin: tuple[int, ...]
    box: Box  # relative to the item's start
    operands: tuple[Operand, ...]

    @property
    def strategy(self) -> Strategy:
        return COMPUTED

    @property
    def nbytes(self) -> int:
        """Source bytes wanted."""
        return sum(transfer.nbytes for operand in self.operands for transfer in operand.transfers)


def only_zeros(transfers: Iterable[Transfer | Computation]) -> bool:
    """Whether nothing but zeros comes of these transfers: none are read or computed to know them."""
    return all(isinstance(t, Computation) and isinstance(t.kernel, Zeros) for t in transfers)


def stored_parts(transfers: Iterable[Transfer | Computation]) -> Iterator[Transfer]:
    """The transfers that read stored payloads, those below computations included."""
    for transfer in transfers:
        if isinstance(transfer, Transfer):
            yield transfer
        else:
            for operand in transfer.operands:
                yield from stored_parts(operand.transfers)


class OutputItem(NamedTuple):
    """One `torch.save` archive or bare payload to write at `offset` of `file`; `length` bytes with its container."""

    key: str
    box: Box  # in the target tensor's global coordinates
    dtype: str
    file: str
    offset: int
    length: int
    transfers: tuple[Transfer | Computation, ...]
    zero_elems: int = 0  # elements that no transfer covers: zeros
    bare: bool = False  # the payload alone, without an archive around it (safetensors)

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.box.volume * itemsize(self.dtype)


class OutputBlob(NamedTuple):
    """An archive with known bytes: an object (`box` None) or a small whole tensor."""

    key: str
    box: Box | None
    file: str
    offset: int
    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)


class TensorInfo(NamedTuple):
    """A target tensor: element type and global shape (elements per dimension)."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All archives of a target checkpoint, blobs and items each in file order."""

    items: tuple[OutputItem, ...]
    blobs: tuple[OutputBlob, ...]
    file_bytes: Mapping[str, int]  # file name -> length in bytes
    tensors: Mapping[str, TensorInfo]
    paths: Mapping[str, tuple[str | int, ...]]  # planner_data: key -> path
    digest: str  # SHA-256 over all other fields
    original_shapes: Mapping[str, tuple[int, ...]] | None = None  # `mcore_data`: see `Catalog`
    linked: tuple[OutputItem, ...] = ()  # where the source has them: in files that the output shares with it
    links: Mapping[str, int] = field(
        default_factory=dict
    )  # these files, not in `file_bytes` -> length in bytes

    @property
    def bytes_to_write(self) -> int:
        """Length of all files together, in bytes, without those that are linked."""
        return sum(self.file_bytes.values())

    @property
    def bytes_by_strategy(self) -> Counter[Strategy]:
        """Source payload bytes wanted, by transfer strategy."""
        count: Counter[Strategy] = Counter()
        for item in self.items:
            for transfer in item.transfers:
                count[transfer.strategy] += transfer.nbytes
        return count

    def source_key(self, item: Item) -> str:
        """The tensor that a source item holds a part of; looked for, as only messages ask."""
        items = (*self.items, *self.linked)
        keys = (t.key for o in items for t in stored_parts(o.transfers) if t.item == item)
        return next(keys, "")

    @property
    def source_files(self) -> list[str]:
        return sorted({t.item.file for item in self.items for t in stored_parts(item.transfers)})


def plan_summary(plan: Plan) -> dict[str, object]:
    """The plan without its items, which `item_rows` gives one at a time, and without its tensors."""
    return {
        "schema_version": 1,
        "digest": plan.digest,
        "bytes_to_write": plan.bytes_to_write,
        "bytes_by_strategy": dict(plan.bytes_by_strategy),
        "files": dict(plan.file_bytes),
    }


def links_summary(plan: Plan) -> dict[str, object]:
    """Files that the output shares with its source, in bytes, and how much in them belongs to nothing in it."""
    used = {(item.file, item.offset): item.length for item in plan.linked}
    unused = sum(plan.links.values()) - sum(used.values())
    return {"linked_files": dict(plan.links), "bytes_unreferenced": unused}


def item_rows(plan: Plan) -> Iterator[dict[str, object]]:
    """Every item as a JSON object."""
    for item in plan.items:
        yield {
            "key": item.key,
            "box": {"start": list(item.box.start), "size": list(item.box.size)},
            "dtype": item.dtype,
            "file": item.file,
            "offset": item.offset,
            "length": item.length,
            "zero_elems": item.zero_elems,
            "transfers": [_transfer_json(t) for t in item.transfers],
        }


def _transfer_json(t: Transfer | Computation) -> dict[str, object]:
    box = {"start": list(t.box.start), "size": list(t.box.size)}
    if isinstance(t, Transfer):
        return {
            "source": t.key,
            "file": t.item.file,
            "item_offset": t.item.offset,
            "item_length": t.item.length,
            "dtype": t.dtype,
            "box": box,
            "payload_offset": t.piece.offset,
            "payload_strides": list(t.piece.strides),
            "strategy": t.strategy,
        }
    return {
        "source": t.key,
        "kernel": t.kernel.name,
        "dtype": t.dtype,
        "box": box,
        "inputs": [[_transfer_json(part) for part in operand.transfers] for operand in t.operands],
        "strategy": t.strategy,
    }
