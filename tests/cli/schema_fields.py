"""The fields of every JSON report, as they were when they were last looked at: `tests/data/schema_fields.txt`.

python -m tests.cli.schema_fields       writes it again; what goes or changes its type needs a higher schema_version
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckpt_tools
from tests.conftest import DATA

RECORD = DATA / "schema_fields.txt"
SCHEMAS = Path(ckpt_tools.__file__).parent / "schemas"


def present() -> dict[str, set[str]]:
    """`<schema>:<version>` -> its fields, each with its type and whether it is always there."""
    found = {}
    for path in sorted(SCHEMAS.glob("*.json")):
        schema = json.loads(path.read_text())
        found[schema["$id"].removeprefix("urn:ckpt_tools:")] = set(_fields(schema, schema, "", ()))
    return {
        name: fields for name, fields in found.items() if fields
    }  # a group map has only names of the model's


def recorded() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in RECORD.read_text().splitlines():
        name, _, field = line.partition(" ")
        found.setdefault(name, set()).add(field)
    return found


def gone(then: dict[str, set[str]], now: dict[str, set[str]]) -> list[str]:
    """Fields that a version had and has no more, or has otherwise: programs read them by that version."""
    lost = {name: fields - now[name] for name, fields in then.items() if name in now}
    return [f"{name} {field}" for name, fields in lost.items() for field in sorted(fields)]


def _fields(
    node: dict[str, Any], schema: dict[str, Any], path: str, within: tuple[str, ...]
) -> Iterator[str]:
    if reference := node.get("$ref"):
        if reference in within:  # a tree
            return
        target: Any = schema
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
        yield from _fields(target, schema, path, (*within, reference))
    for name, field in node.get("properties", {}).items():
        place = f"{path}.{name}" if path else name
        yield f"{place} {_type(field)}" + (" always" if name in node.get("required", ()) else "")
        yield from _fields(field, schema, place, within)
    inner = [("[]", node.get("items")), (".*", node.get("additionalProperties"))]
    inner += [("", each) for key in ("anyOf", "oneOf", "allOf") for each in node.get(key, ())]
    for step, each in inner:
        if isinstance(each, dict):
            yield from _fields(each, schema, path + step, within)


def _type(field: dict[str, Any]) -> str:
    given = field.get("type", "any")
    return "|".join(given) if isinstance(given, list) else given


if __name__ == "__main__":
    if lost := gone(recorded(), present()):
        raise SystemExit("\n".join(["these need a higher schema_version:", *lost]))
    lines = [f"{name} {field}\n" for name, fields in present().items() for field in sorted(fields)]
    RECORD.write_text("".join(lines))
