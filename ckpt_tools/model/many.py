"""The dataclass of which a plan makes hundreds of thousands: frozen for who reads and checks it, plain when it runs.

What `frozen=True` adds at run time is a call of `object.__setattr__` for every field of every instance, two thirds
of making it (1.9 us for a `TargetTensor`, 0.6 without). mypy sees the frozen dataclass, and refuses an assignment
anywhere in the project.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["many"]

if TYPE_CHECKING:
    from dataclasses import dataclass as many
else:
    from dataclasses import dataclass

    def many(*, frozen, slots):
        """`dataclass(frozen=True, slots=True)`, with its hash, but for the refusal of assignments."""
        assert frozen
        return dataclass(slots=slots, unsafe_hash=True)
