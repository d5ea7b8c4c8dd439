"""The garbage collector, left alone while millions of small objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """A context, or a decorator, inside which no garbage is looked for.

    Plans are tuples without cycles: a collector would go through all of them again and again and find nothing
    (a quarter of the time to plan 400,000 items). What was made is old afterwards; it would be gone through three
    times on its usual way there.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # somebody else's frozen objects stay frozen
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
