"""What one rank of the training job needs for its share of the model, in bytes by part.

Buffer sizes are exact: they are those the released code allocates. `communication` is what is gathered or reduced
at the worst moment, read from the code of Megatron-FSDP 0.6.1, not measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_tools.errors import UsageError
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.sharding.parameters import row_size
from ckpt_tools.sharding.placement import Bucket, Placement, chunk_length

_MOMENTS = 2  # exp_avg and exp_avg_sq


class _Range(NamedTuple):
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank. `padding` is the share of the first three that holds no element of any tensor."""

    weights: int = 0
    main_weights: int = 0
    gradients: int = 0
    adam: int = 0
    padding: int = 0
    communication: int = 0

    @property
    def persistent(self) -> int:
        return self.weights + self.main_weights + self.gradients + self.adam

    @property
    def peak(self) -> int:
        """Persistent bytes and communication buffers; activations are not known here."""
        return self.persistent + self.communication

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def rank_memory(
    placement: Placement, rank: int, main_dtype: str | None = "float32", grad_dtype: str | None = None
) -> Memory:
    """Bytes on `rank` by part.

    `main_dtype` is that of the weights the optimizer steps (None: the model's own), `grad_dtype` that of the
    gradient buffers (None: the model's).
    """
    if placement.layout == "even":
        raise UsageError("--layout even says how files are cut, not what a job holds; choose another layout")
    total = Memory(weights=sum(p.numel * itemsize(p.dtype) for p in placement.parameters if p.buffer))
    if placement.layout == "fsdp2":
        for i, start, stop in placement.rows(rank):
            if not placement.parameters[i].buffer:
                total += _alone(placement, i, stop - start)
        return total
    buckets = placement.buckets(rank)
    for bucket in buckets:
        total += _held(placement, bucket, placement.part(bucket, rank), main_dtype, grad_dtype)
    return replace(total, communication=_communication(placement, buckets, main_dtype, grad_dtype))


def _alone(placement: Placement, i: int, rows: int) -> Memory:
    """An FSDP2 parameter: every rank allocates a full chunk, and the optimizer steps the parameter itself."""
    p, shape = placement.parameters[i], placement.local_shapes[i]
    width, row = itemsize(p.dtype), row_size(shape)
    allocated = chunk_length(shape[0], placement.shard_size(p.is_expert)) * row
    return Memory(
        weights=allocated * width,
        gradients=allocated * width * p.trainable,
        adam=_MOMENTS * rows * row * width * p.trainable,
        padding=(allocated - rows * row) * width * (1 + p.trainable),
    )


def _held(
    placement: Placement, bucket: Bucket, part: int, main_dtype: str | None, grad_dtype: str | None
) -> Memory:
    """What a rank holds of one bucket all the time; its optimizer works on part number `part`."""
    group = bucket.group
    v1 = placement.layout == "mfsdp-v1"
    # with equal types v2's main weights are the model weights
    has_main = group.trainable if v1 else main_dtype != group.dtype
    model_width = itemsize(group.dtype)
    main_width = itemsize(main_dtype) if main_dtype and has_main else 0
    grad_width = itemsize(grad_dtype or _reduced(group.dtype)) if group.trainable else 0
    weight, main, grad = _ranges(placement, bucket, part)
    own = _elements(bucket, main)
    held = [
        (_Range(0, 0) if v1 and placement.topology.strategy == "no_shard" else weight, model_width),
        (main, main_width),
        (grad, grad_width),
    ]
    weights, main_weights, gradients = ((stop - start) * width for (start, stop), width in held)
    padding = sum(((r.stop - r.start) - _elements(bucket, r)) * width for r, width in held)
    if v1 and placement.topology.strategy == "no_shard":  # the model's own tensors, in no buffer
        weights = own * model_width
    adam = _MOMENTS * (main_width or model_width) * own * group.trainable
    return Memory(weights, main_weights, gradients, adam, padding)


def _reduced(dtype: str) -> str:
    """The type of a parameter's gradient where none is asked for: its own, and bf16 for weights held in FP8."""
    return "bfloat16" if dtype.startswith("float8") else dtype


def _ranges(placement: Placement, bucket: Bucket, part: int) -> tuple[_Range, _Range, _Range]:
    """Bucket elements of the model weight, main weight (and moments), and gradient that a rank holds."""
    topology = placement.topology
    full, own = _Range(0, bucket.size), _Range(*bucket.part_range(part))
    if topology.strategy == "no_shard":
        return full, full, full
    inner = own
    if topology.shards_outer:  # the outer parts of one inner part lie side by side
        length = bucket.size // bucket.parts * topology.dp_outer
        start = own.start // length * length
        inner = _Range(start, start + length)
    if placement.layout == "mfsdp-v2":  # model weights rest where the optimizer works
        return own, own, full if topology.strategy == "optim" else inner
    weight = inner if topology.strategy == "optim_grads_params" else full
    return weight, own, full if topology.strategy == "optim" else inner


def _elements(bucket: Bucket, held: _Range) -> int:
    """Elements of real tensors in a range of the bucket."""
    return sum(piece.stop - piece.start for piece in bucket.packing.pieces(*held))


def _communication(
    placement: Placement, buckets: Sequence[Bucket], main_dtype: str | None, grad_dtype: str | None
) -> int:
    """Bytes of buffers that exist only while data moves.

    Gathered weights: the root's stay after their first use, and two units are there at a time, one computing and
    the next one prefetched. Gradients: one unit's being reduced, and where their type is not the main weights', a
    cast copy of the rank's part until the optimizer has stepped.
    """
    strategy = placement.topology.strategy
    gathered: dict[int | None, int] = defaultdict(int)
    reduced: dict[int | None, int] = defaultdict(int)
    cast = 0
    for bucket in buckets:
        group = bucket.group
        grad = grad_dtype or _reduced(group.dtype)
        if bucket.parts > 1 and strategy == "optim_grads_params":
            gathered[group.unit] += bucket.size * itemsize(group.dtype)
        if bucket.parts > 1 and strategy in ("optim_grads", "optim_grads_params") and group.trainable:
            reduced[group.unit] += bucket.size * itemsize(grad)
        if main_dtype not in (None, grad) and group.trainable and main_dtype:
            part = bucket.size if strategy == "no_shard" else bucket.size // bucket.parts
            cast += part * itemsize(main_dtype)
    root = gathered.pop(None, 0)
    return root + sum(sorted(gathered.values())[-2:]) + max(reduced.values(), default=0) + cast
