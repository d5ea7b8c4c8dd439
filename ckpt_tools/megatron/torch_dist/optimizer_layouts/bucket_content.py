"""Elements of weights and buckets, read a few at a time and compared as bit patterns."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import UnsupportedCheckpointError
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import find_tensor
from ckpt_tools.formats.torch_archive.tensor_template import usual_item
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_order import LookAlikes
from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import Bucket, Flat, Piece
from ckpt_tools.model.catalog import Chunk
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.roles import MASTER

if TYPE_CHECKING:
    import numpy.typing as npt

    Bits = npt.NDArray[Any]  # unsigned integers of the size of the element type

TILE = 1 << 18  # elements compared at a time: what that takes stays in the cache
SAMPLE = 64  # elements in each of the three windows of a fingerprint

Fingerprint = tuple[bytes, ...]


class Reader:
    """Elements of chunks and buckets, as bit patterns of their type. Finds each chunk's payload once."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._payload_offset = lru_cache(maxsize=1 << 16)(self._find_payload)

    def chunk(self, chunk: Chunk, dtype: str, start: int, count: int) -> Bits:
        """`count` elements from element `start` of a chunk's row-major payload."""
        import numpy as np

        size = itemsize(dtype)
        bits = np.empty(count, f"<u{size}")
        offset = self._payload_offset(chunk, dtype) + start * size
        self._files.read_into(chunk.item.file, offset, bits.view(np.uint8).data)
        return bits

    def flat(self, flat: Flat, start: int, count: int) -> Bits:
        """`count` elements from element `start` of a bucket's state."""
        import numpy as np

        parts: list[Bits] = []
        at = bisect.bisect_right(flat.chunks, start, key=lambda run: run[0]) - 1
        while count > 0:
            first, chunk = flat.chunks[at]
            take = min(count, first + chunk.box.volume - start)
            parts.append(self.chunk(chunk, flat.entry.dtype, start - first, take))
            start, count, at = start + take, count - take, at + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _find_payload(self, chunk: Chunk, dtype: str) -> int:
        if chunk.item.bare:
            return chunk.item.offset
        usual = usual_item(self._files, chunk.item, dtype, chunk.box.size)
        if usual is not None:
            return usual.start
        tensor = find_tensor(self._files, chunk.item)
        if tensor.dtype != dtype or tensor.shape != chunk.box.size or not tensor.is_row_major:
            raise UnsupportedCheckpointError(
                f"{chunk.item.file} at byte {chunk.item.offset}: expected a row-major {dtype} tensor of shape "
                f"{chunk.box.size}, found {tensor.dtype} {tensor.shape} with strides {tensor.strides}"
            )
        return tensor.payload_offset


def round_bits(bits: Bits, dtype: str, to: str) -> Bits:
    """fp32 bit patterns rounded to nearest even, as bit patterns of `to`."""
    import numpy as np

    if dtype == to:
        return bits
    if dtype == "float32" and to == "bfloat16":
        rounded: Bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        rounded[np.isnan(bits.view("<f4"))] = 0x7FC0
        return rounded.astype("<u2")
    if dtype == "float32" and to == "float16":
        with np.errstate(over="ignore"):
            half: Bits = bits.view("<f4").astype("<f2")
        return half.view("<u2")
    raise UnsupportedCheckpointError(f"masters of type {dtype} for weights of type {to} are not supported")


class PieceIndex:
    """Every weight shard by what a few of its elements look like."""

    def __init__(self, pieces: Iterable[Piece], reader: Reader) -> None:
        grouped: dict[tuple[str, int, Fingerprint], list[Piece]] = {}
        self.families: dict[tuple[str, int | None], int] = {}
        for piece in pieces:
            sample = tuple(
                reader.chunk(piece.chunk, piece.dtype, piece.first + a, n).tobytes()
                for a, n in windows(piece.numel)
            )
            grouped.setdefault((piece.dtype, piece.numel, sample), []).append(piece)
            self.families[piece.family] = self.families.get(piece.family, 0) + 1
        self._by_head: dict[tuple[str, bytes], list[tuple[int, Fingerprint, LookAlikes]]] = {}
        for (dtype, numel, sample), members in grouped.items():
            entry = (numel, sample, LookAlikes(tuple(members)))
            self._by_head.setdefault((dtype, sample[0]), []).append(entry)
        self._heads: dict[str, set[int]] = {}  # lengths in bytes
        for dtype, head in self._by_head:
            self._heads.setdefault(dtype, set()).add(len(head))

    def matches(self, bucket: Bucket, start: int, reader: Reader) -> Iterator[LookAlikes]:
        """Look-alikes whose samples agree with what the bucket has from element `start` on; longest first."""
        dtype, master = bucket.param_dtype, bucket.states[MASTER]

        def rounded(at: int, count: int) -> bytes:
            bits = reader.flat(master, start + at, count)
            return round_bits(bits, master.entry.dtype, dtype).tobytes()

        head = rounded(0, min(SAMPLE, bucket.numel - start))
        found = [e for n in self._heads.get(dtype, ()) for e in self._by_head.get((dtype, head[:n]), ())]
        for numel, sample, alike in sorted(found, key=lambda entry: -entry[0]):
            if start + numel <= bucket.numel and all(
                rounded(a, n) == expected
                for (a, n), expected in zip(windows(numel)[1:], sample[1:], strict=True)
            ):
                yield alike

    def continues(self, before: LookAlikes | None, after: LookAlikes) -> bool:
        """Whether both can be parts of one live parameter."""
        return before is not None and bool(
            {p.family for p in before.members} & {p.family for p in after.members}
        )

    def can_continue(self, alike: LookAlikes) -> bool:
        """Whether anything could follow inside the same live parameter."""
        return any(self.families[p.family] > 1 for p in alike.members)


def windows(numel: int) -> list[tuple[int, int]]:
    """(start, count) of up to three samples of a tensor: head, middle, tail."""
    if numel <= SAMPLE:
        return [(0, numel)]
    return [(0, SAMPLE), ((numel - SAMPLE) // 2, SAMPLE), (numel - SAMPLE, SAMPLE)]


def tiles(numel: int) -> list[tuple[int, int]]:
    """(start, count) of consecutive stretches that cover a tensor."""
    return [(a, min(TILE, numel - a)) for a in range(0, numel, TILE)]
