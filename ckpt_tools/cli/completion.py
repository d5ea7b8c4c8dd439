"""What Tab offers beside commands and options: stored keys and iterations of the checkpoints on the command line.

Nothing is asked of a store, nothing large is read, and whatever goes wrong offers nothing: a Tab must not fail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MAX_METADATA_BYTES = 16 << 20  # 0.7 CPU seconds with the start
_ITERATION = "iteration"


class Item(NamedTuple):
    """One offer, with the fields of click's CompletionItem, of which typer has its own copy in some versions."""

    value: str
    type: str = "plain"
    help: str | None = None


def offer_values(command: Any) -> Any:
    """`command`, whose options and arguments for keys and iterations complete from the checkpoints that are named.

    Keys that are looked at or compared are those that all have; otherwise the first checkpoint is the source.
    """
    for param in command.params:
        if param.name == "keys":
            param.shell_complete = _from(_stored_keys, of_all=True)
        elif param.name in ("key", "ignore_keys"):
            param.shell_complete = _from(_stored_keys)
        elif param.name == _ITERATION:
            param.shell_complete = _from(_iterations)
    return command


def _from(
    offers: Callable[[str, int | None], set[str]], of_all: bool = False
) -> Callable[[Any, str], list[Item]]:
    """A completion of what `offers` finds in the first folder that is named, or in all of them."""

    def complete(context: Any, incomplete: str) -> list[Item]:
        try:
            number = context.params.get(_ITERATION)
            iteration = int(number) if number is not None and str(number).isdigit() else None
            found = [offers(path, iteration) for path in _folders(context)[: None if of_all else 1]]
            values = set.intersection(*found) if found else set()
            return [Item(value) for value in sorted(values, key=_in_order) if value.startswith(incomplete)]
        except Exception:
            return []

    return complete


def _in_order(value: str) -> tuple[int, str]:
    return (int(value) if value.isdigit() else 0, value)


def _folders(context: Any) -> list[str]:
    """The folders among the arguments that are typed. An option without its value keeps click from naming them."""
    named = [p.name for p in context.command.params if p.param_type_name == "argument"]
    words = [context.params.get(name) for name in named]
    words = [*words, *(word for several in words if isinstance(several, list | tuple) for word in several)]
    words += context.args
    return list(
        dict.fromkeys(word for word in words if isinstance(word, str) and word and Path(word).is_dir())
    )


def _stored_keys(path: str, iteration: int | None) -> set[str]:
    from ckpt_tools.formats.dcp import METADATA, read_catalog
    from ckpt_tools.formats.detect import locate
    from ckpt_tools.formats.files import open_files
    from ckpt_tools.formats.safetensors import read_safetensors_catalog

    location = locate(path, iteration)
    if location.kind == "safetensors":
        return set(read_safetensors_catalog(location.path).tensors)
    if (Path(location.path) / METADATA).stat().st_size > MAX_METADATA_BYTES:
        return set()
    files = open_files(location.path)
    try:
        catalog = read_catalog(files)
        return {*catalog.tensors, *catalog.objects}
    finally:
        files.close()


def _iterations(path: str, _: int | None) -> set[str]:
    from ckpt_tools.formats.detect import iteration_numbers

    return {str(number) for number in iteration_numbers(path)}
