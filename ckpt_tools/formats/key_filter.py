"""Keys of a checkpoint that a user leaves out (`--ignore-keys`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ckpt_tools.close_names import refuse_unmatched
from ckpt_tools.model.catalog import Catalog


def leave_out(catalog: Catalog, globs: Sequence[str]) -> tuple[Catalog, tuple[str, ...]]:
    """The catalog without the tensors and objects whose keys match; a line for each."""
    if not globs:
        return catalog, ()
    keys = (*catalog.tensors, *catalog.objects)
    refuse_unmatched("--ignore-keys", globs, keys)
    gone = {key for key in keys if any(fnmatchcase(key, glob) for glob in globs)}
    kept = replace(
        catalog,
        tensors={key: entry for key, entry in catalog.tensors.items() if key not in gone},
        objects={key: entry for key, entry in catalog.objects.items() if key not in gone},
    )
    return kept, tuple(f"{key}: --ignore-keys" for key in keys if key in gone)
