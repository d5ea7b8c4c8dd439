"""A room imports nothing from a room to its right, and no modules import each other in a circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPO

PACKAGE = REPO / "ckpt_tools"
# From left to right; what stands in no folder (errors, credentials) is on the ground floor too.
ROOMS = ("model", "formats", "megatron", "sharding", "plan", "execute", "verify", "commands", "cli")
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Rooms that a module imports at run time, with the line."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        names: list[str] = []
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "ckpt_tools":
                names = [f"ckpt_tools.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "ckpt_tools" and len(parts) > 1 and parts[1] in ROOMS:
                yield parts[1], node.lineno


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_nothing_to_its_right(path):
    own = ROOMS.index(path.relative_to(PACKAGE).parts[0])
    wrong = [f"line {line}: {room}" for room, line in _imports(path) if ROOMS.index(room) > own]
    assert not wrong, wrong


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions and for type checkers count too."""
    names = {".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): path
             for path in PACKAGE.rglob("*.py")}  # fmt: skip
    imports: dict[str, set[str]] = {}
    for name, path in names.items():
        imports[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imports[name] |= (inner & names.keys()) or {node.module}
    left = {name: found & names.keys() - {name, "ckpt_tools"} for name, found in imports.items()}
    left.pop("ckpt_tools")  # it names the public API
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    assert not left
