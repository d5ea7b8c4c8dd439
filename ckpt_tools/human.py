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
    plural = "" if count == 1 else "es" if thing.endswith("s") else "s"
    return f"{count:,} {thing}{plural}"
