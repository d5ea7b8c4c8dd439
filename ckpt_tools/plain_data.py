"""Reports in JSON's types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any


def plain(value: Any, names: Mapping[str, str] | None = None) -> Any:
    """Dataclasses and named tuples as objects; fields keep their names unless `names` has another.

    Numbers that JSON does not have, NaN and infinities, become text.
    """
    names = names or {}
    if is_dataclass(value):
        return {names.get(f.name, f.name): plain(getattr(value, f.name), names) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {names.get(name, name): plain(getattr(value, name), names) for name in value._fields}
    if isinstance(value, Mapping):
        return {key: plain(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, names) for each in value]
    return value if not isinstance(value, float) or isfinite(value) else str(value)
