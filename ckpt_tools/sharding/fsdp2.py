"""PyTorch FSDP2: every parameter is cut on its own along dimension 0, by the rule of `torch.chunk`.

Tensor parallelism cuts first: dimension 0 of a column-parallel parameter is cut twice, TP outside and FSDP
inside, which torch writes as ``[_StridedShard(0, split_factor=tp), Shard(0)]`` on the mesh (dp, tp).
"""

from __future__ import annotations


def chunk_length(rows: int, parts: int) -> int:
    """Rows of a full chunk; FSDP2 allocates this many on every rank, whatever it owns."""
    return -(-rows // parts)


def chunk_rows(rows: int, parts: int, index: int) -> tuple[int, int]:
    """Rows `[start, stop)` of chunk `index` of `parts`: equal ones, then at most one shorter, then empty ones.

    Worked example, 9 rows over 8 ranks: 2, 2, 2, 2, 1, 0, 0, 0.
    """
    length = chunk_length(rows, parts)
    return min(index * length, rows), min((index + 1) * length, rows)
