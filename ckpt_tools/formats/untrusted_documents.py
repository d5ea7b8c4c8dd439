"""JSON and YAML from untrusted sources, as plain values: bounded in length, depth and expanded aliases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.storage.files import SMALL_FILE_BYTES

if TYPE_CHECKING:
    import yaml

MAX_YAML_BYTES = 1 << 20  # its parser takes a hundred times the memory, and seconds; real ones have 20 kB
MAX_DEPTH = 64
_MAX_NODES = 1 << 20  # after aliases are expanded


class DocumentError(CkptError, ValueError):
    """A document that is not what its name says; who asked for it adds the name."""

    exit_code = 4


def parse_json(data: bytes) -> Any:
    """The value of a JSON document."""
    try:
        return json.loads(data)
    except RecursionError:
        raise DocumentError("it is nested too deep") from None
    except ValueError as error:
        raise DocumentError(f"it is not JSON: {error}") from None


def parse_yaml(data: bytes | str) -> Any:
    """The value of a YAML document."""
    return parse_marked_yaml(data)[0]


def parse_marked_yaml(data: bytes | str, *, ours: bool = False) -> tuple[Any, yaml.Node | None]:
    """The value of a YAML document, and its nodes, which know their lines.

    `ours`: a file of this package. libyaml reads it in a tenth of the time, but it recurses on the C stack, so that
    untrusted files are not given to it.
    """
    import yaml

    if len(data) > MAX_YAML_BYTES:
        raise DocumentError(f"it has {len(data):,} bytes; at most {MAX_YAML_BYTES:,} are read")
    loader: Any = None
    try:
        kind: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if ours else yaml.SafeLoader
        loader = kind(data)  # finds the encoding at once
        node = loader.get_single_node()
        if node is None:
            return None, None
        _count_nodes(node, 0, {})
        return loader.construct_document(node), node
    except RecursionError:
        raise DocumentError("it is nested too deep") from None
    except DocumentError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise DocumentError(  # a value's constructor may raise anything
            f"it is not YAML: {' '.join(str(error).split())}"
        ) from None
    finally:
        if loader is not None:
            loader.dispose()


def _count_nodes(node: yaml.Node, depth: int, seen: dict[int, int]) -> int:
    """Nodes below and including `node`, an aliased one once for each alias; 0 in `seen`: being counted."""
    if depth > MAX_DEPTH:
        raise DocumentError(f"it is nested deeper than {MAX_DEPTH} levels")
    known = seen.get(id(node))
    if known is not None:
        if not known:
            raise DocumentError("an alias names what it is a part of")
        return known
    seen[id(node)] = 0
    value = node.value
    parts = value if isinstance(value, list) else ()
    total = 1
    for part in parts:
        total += sum(
            _count_nodes(one, depth + 1, seen) for one in (part if isinstance(part, tuple) else (part,))
        )
        if total > _MAX_NODES:
            raise DocumentError(f"its aliases make more than {_MAX_NODES:,} values of it")
    seen[id(node)] = total
    return total


def read_named_file(path: Path, limit: int = SMALL_FILE_BYTES) -> bytes:
    """All of a file that a user named, which may be a pipe."""
    data = bytearray()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            data += part
            if len(data) > limit:
                raise DocumentError(f"it has more than {limit:,} bytes")
    return bytes(data)
