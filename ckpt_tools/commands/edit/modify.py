"""`modify-state-dict`: a copy of a checkpoint without some keys or with other names; its bytes are moved."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ckpt_tools.commands.job.conversion import Conversion, EditOptions, Progress
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.report import ConversionReport, Edits
from ckpt_tools.commands.job.rewrite import edit, rewrite
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError, list_problems, raise_if
from ckpt_tools.formats.storage.files import AnyPath
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.target import Target, TargetObject, target_of

KeyPath = tuple[str | int, ...]


class Operation(NamedTuple):
    """`remove` every key in which `pattern` is found, or `rename` by substituting it."""

    text: str  # as the user wrote it
    pattern: re.Pattern[str]
    replacement: str | None  # None: remove


def modify_state_dict(
    source: AnyPath,
    output: AnyPath,
    operations: Sequence[str],
    options: EditOptions | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write the checkpoint at `source` to `output` with `operations` carried out on its keys.

    Removals come first; of several renames the first that matches a key wins (`re.search`, `re.sub`).

    Raises:
        UsageError: an operation that cannot be read, or that changes nothing; nothing would be left.
        MappingError: two keys would get the same name.
        Otherwise the errors of opening, planning and writing.
    """
    parsed = [parse_operation(text) for text in operations]
    if not parsed:
        raise UsageError(
            'nothing to do; give at least one --op "remove REGEX" or --op "rename REGEX REPLACEMENT"'
        )
    return edit(
        source,
        output,
        lambda opened: _plan(opened, parsed),
        options or EditOptions(),
        progress,
    )


def _plan(opened: Opened, operations: Sequence[Operation]) -> Conversion:
    if opened.location.kind == "safetensors":
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is a Hugging Face model; only torch distributed checkpoints are edited"
        )
    catalog = opened.catalog
    keys = [*catalog.tensors, *catalog.objects]
    names = new_names(keys, operations)
    shapes = catalog.original_shapes
    if shapes is not None:
        shapes = {names[key]: shape for key, shape in shapes.items() if key in names}
    edits = Edits(
        removed=tuple(key for key in keys if key not in names),
        renamed={key: name for key, name in names.items() if key != name},
    )
    target = renamed_target(catalog, names)
    return rewrite(opened, target, renamed_archives(opened, names), edits, original_shapes=shapes)


def parse_operation(text: str) -> Operation:
    """The operation that `remove REGEX` or `rename REGEX REPLACEMENT` describes."""
    kind, *words = text.split() or [""]
    if (kind, len(words)) not in (("remove", 1), ("rename", 2)):
        raise UsageError(
            f"--op {text!r}: expected 'remove REGEX' or 'rename REGEX REPLACEMENT' (a space in a pattern is \\s)"
        )
    try:
        pattern = re.compile(words[0])
        if len(words) == 2:
            re.sub(pattern, words[1], "")  # a replacement may name groups that the pattern has not
    except (re.error, IndexError) as error:
        raise UsageError(f"--op {text!r}: {error}") from None
    return Operation(text, pattern, words[1] if len(words) == 2 else None)


def new_names(keys: Iterable[str], operations: Sequence[Operation]) -> dict[str, str]:
    """Every key that stays -> its new name, in the given order."""
    removals = [op for op in operations if op.replacement is None]
    renames = [op for op in operations if op.replacement is not None]
    used: set[Operation] = set()
    names: dict[str, str] = {}
    for key in keys:
        removing = next((op for op in removals if op.pattern.search(key)), None)
        renaming = next((op for op in renames if op.pattern.search(key)), None)
        if removing is not None:
            used.add(removing)
        elif renaming is None or renaming.replacement is None:
            names[key] = key
        else:
            used.add(renaming)
            names[key] = renaming.pattern.sub(renaming.replacement, key)
    idle = [op.text for op in operations if op not in used]
    if idle:
        raise UsageError(
            "operations that no key needs; are the patterns right?\n" + list_problems(idle), idle
        )
    if not names:
        raise UsageError("no key would be left; nothing was written")
    if "" in names.values():
        raise UsageError("a key would get an empty name; nothing was written")
    clashes = [name for name, count in Counter(names.values()).items() if count > 1]
    raise_if(clashes, MappingError, "several keys would get the same name")
    return names


def renamed_target(
    catalog: Catalog, names: Mapping[str, str], taken_from: Mapping[str, str] = MappingProxyType({})
) -> Target:
    """What stays, under new names; `taken_from` maps a tensor to the one that its values come from."""
    paths = {key: new_path(catalog.planner_paths.get(key, (key,)), name) for key, name in names.items()}
    values = {key: catalog.tensors[taken_from.get(key, key)] for key in catalog.tensors if key in names}
    return Target(
        tensors=tuple(target_of(names[key], entry.value, paths[key]) for key, entry in values.items()),
        objects=tuple(TargetObject(names[key], None, paths[key]) for key in catalog.objects if key in names),
    )


def renamed_archives(opened: Opened, names: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """(new key, archive) of the objects that stay."""
    for key, entry in opened.catalog.objects.items():
        if key in names:
            yield names[key], read_archive(opened.files, entry.item)


def new_path(path: KeyPath, name: str) -> KeyPath:
    """The planner path of a renamed key: what is unchanged at both ends stays apart, the middle becomes one step."""
    if ".".join(map(str, path)) == name:
        return path
    head, tail, rest = [], [], name
    for step in path:
        if not rest.startswith(f"{step}."):
            break
        head.append(step)
        rest = rest[len(f"{step}.") :]
    for step in reversed(path[len(head) :]):
        if not rest.endswith(f".{step}"):
            break
        tail.append(step)
        rest = rest[: -len(f".{step}")]
    return (*head, rest, *reversed(tail))
