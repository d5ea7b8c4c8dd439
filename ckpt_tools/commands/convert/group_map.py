"""`build-param-group-map`: the parameter group map of a dump, or one derived from a checkpoint alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools.commands.convert.to_fsdp_dtensor import membership_map
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.job.read_model import read_model
from ckpt_tools.commands.look.dcp_json import read_group_map
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError
from ckpt_tools.formats.locate.detect import locate
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.formats.untrusted_documents import read_named_file
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.write import build_fsdp_target

MAX_MAP_BYTES = 128 << 20  # a million parameters


@dataclass(frozen=True, slots=True)
class GroupMap:
    """Parameter name -> group id, and the rule that placed each; `source` is `dump` or `derived`."""

    groups: Mapping[str, int]
    rules: Mapping[str, str]
    source: str


def build_group_map(
    source: AnyPath, options: TargetOptions | None = None, iteration: int | None = None
) -> GroupMap:
    """The map of a `--dump-param-to-param-group-map` folder, or derived from a `torch_dist` checkpoint.

    Raises:
        UnsupportedCheckpointError: `source` is neither.
        MappingError: the groups cannot be derived, with the reason.
    """
    source = path_text(source)
    location = locate(source, iteration, of_run=True)
    dumped = read_group_map(location.path) if location.kind == "dcp" else None
    if dumped is not None:
        return GroupMap(dumped, dict.fromkeys(dumped, "dumped by the training job"), "dump")
    if location.kind != "torch_dist":
        raise UnsupportedCheckpointError(
            f"{source} is neither a dump of --dump-param-to-param-group-map nor a torch_dist checkpoint"
        )
    with open_checkpoint(source, iteration, of_run=True) as opened:
        model = read_model(opened)
        if model.optimizer_layout is None:
            raise MappingError(f"{source} has no optimizer state, so its parameters have no groups")
        built = build_fsdp_target(model, options or TargetOptions())
    rules = {f"model.module.{name}": m.rule for name, m in built.memberships.items()}
    return GroupMap(membership_map(built), rules, "derived")


def load_group_map(path: Path) -> dict[str, int]:
    """A map file as it stands: parameter names to group ids, checked only for its form."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        if twice:
            raise MappingError(f"{path}: names given more than once: {', '.join(twice[:5])}")
        return dict(pairs)

    try:
        found = json.loads(read_named_file(path, MAX_MAP_BYTES), object_pairs_hook=unique)
    except MappingError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise MappingError(f"{path}: not a readable parameter group map ({error})") from error
    if not isinstance(found, dict):
        raise MappingError(
            f"{path}: holds a {type(found).__name__}; expected one object of names and group ids"
        )
    return found
