"""The fields of every JSON report, as they were when they were last looked at: `tests/data/schema_fields.txt`.

python -m tests.cli.schema_fields       writes it again; what goes or changes its type needs a higher schema_version

It writes the schemas again too, in one layout. What schemas have in common is written by hand once: a report of
`verify` in `verify.json`, what `--iteration all` adds in `conversion.json`.
"""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckpt_tools
from tests.conftest import DATA

RECORD = DATA / "schema_fields.txt"
SCHEMAS = Path(ckpt_tools.__file__).parent / "schemas"
_OF_ITERATIONS = ("edit", "strip")  # whose `--iteration all` is that of `conversion`
_WIDTH = 116


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


def written(name: str) -> str:
    """A schema as its file holds it: the parts that it shares with others, and the layout."""
    schema = _read(name)
    if name in _OF_ITERATIONS:
        one, several = _read("conversion")["anyOf"]
        several["properties"]["schema_version"] = schema["$defs"][name]["properties"]["schema_version"]
        several["properties"]["iterations"]["items"] = one = {"$ref": f"#/$defs/{name}"}
        schema["anyOf"] = [one, several]
    if name == "verify-several":
        report = {key: value for key, value in _read("verify").items() if key[0] != "$" and key != "title"}
        schema["properties"]["reports"]["items"] = report
    return _laid_out(schema, 0) + "\n"


def _read(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.json").read_text())


def _laid_out(value: Any, indent: int) -> str:
    """JSON with what fits a line in one."""
    line = json.dumps(value)
    if indent + len(line) <= _WIDTH or not isinstance(value, dict | list):
        return line
    inner, end = " " * (indent + 2), "\n" + " " * indent
    if isinstance(value, dict):
        members = [f"{inner}{json.dumps(key)}: {_laid_out(each, indent + 2)}" for key, each in value.items()]
        return "{\n" + ",\n".join(members) + end + "}"
    if all(isinstance(each, str) for each in value):
        words = textwrap.wrap(line[1:-1], _WIDTH, initial_indent=inner, subsequent_indent=inner)
        return "[\n" + "\n".join(words) + end + "]"
    return "[\n" + ",\n".join(inner + _laid_out(each, indent + 2) for each in value) + end + "]"


def _type(field: dict[str, Any]) -> str:
    given = field.get("type", "any")
    return "|".join(given) if isinstance(given, list) else given


if __name__ == "__main__":
    if lost := gone(recorded(), present()):
        raise SystemExit("\n".join(["these need a higher schema_version:", *lost]))
    for path in SCHEMAS.glob("*.json"):
        path.write_text(written(path.stem))
    lines = [f"{name} {field}\n" for name, fields in present().items() for field in sorted(fields)]
    RECORD.write_text("".join(lines))
