"""Safetensors files that were written, opened as everybody will open them: with the safetensors library."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from ckpt_tools.errors import VerificationError
from ckpt_tools.model.transfers import Plan

_SUFFIX = ".safetensors"


def prove_shards(plan: Plan, folder: Path) -> None:
    """Nothing, for files of `folder` that the library opens and in which it finds the tensors of the plan.

    It reads the header and maps the rest; no tensor is loaded.

    Raises:
        VerificationError: it does not.
    """
    names = [name for name in plan.file_bytes if name.endswith(_SUFFIX)]
    if not names:
        return
    from safetensors import SafetensorError, safe_open

    expected: dict[str, set[str]] = defaultdict(set)
    for item in plan.items:
        expected[item.file].add(item.key)
    for name in names:
        try:
            with safe_open(folder / name, framework="np") as opened:
                found = set(opened.keys())
        except (SafetensorError, OSError) as error:
            raise VerificationError(
                f"{folder / name}: the safetensors library does not open what was written ({error}). Nothing was "
                "published; please report this."
            ) from error
        if not expected[name] <= found:
            lost = sorted(expected[name] - found)
            raise VerificationError(
                f"{folder / name}: the safetensors library does not find {', '.join(lost[:3])}, which was written. "
                "Nothing was published; please report this."
            )
