"""Numbers as people read them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1: `1.5 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{int(count)} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(count: int, thing: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def human_seconds(seconds: float) -> str:
    """A duration as people say it: `0.4 s`, `12 s`, `71 min`, `3.2 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
