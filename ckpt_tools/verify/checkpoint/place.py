"""Do the folder, the tracker file and the entries next to the weights make loaders find and accept the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable

from ckpt_tools.formats.dcp.metadata_read import METADATA
from ckpt_tools.formats.locate.detect import (
    METADATA_JSON,
    PARTIAL_SUFFIX,
    TRACKER,
    Location,
    fsdp_keys_problem,
    metadata_json_problems,
)
from ckpt_tools.formats.locate.run_layouts import iteration_folders
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.keys import COMMON_OBJECT, GROUP_META
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.verify.report import Check, Findings

_JUDGED = 4  # most newer iterations to check for damage; if there are more, none is checked
_BACKENDS = ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")


def check_place(
    location: Location,
    root: Files | None,
    common: CommonState,
    names_newer: bool = True,
    judge: Callable[[str], str] = lambda _name: "",
) -> Check:
    """Whether the tracker names a checkpoint that exists, and the folder's number is the stored iteration.

    `judge` tells what is wrong with a newer iteration, by the name of its folder; "" where that is not known.
    """
    found = Findings("place", "folders")
    found.looked_at = 1 if root is None else 2
    stored = common.iteration
    if location.iteration is not None and stored is not None and stored != location.iteration:
        found.error(
            location.path,
            f"the folder says iteration {location.iteration}, the checkpoint {stored}",
            number_fix(location, stored),
        )
    for line in location.left_out:
        found.warning(location.path, f"not read: {line}")
    if root is None:
        return found.done()
    names = root.list()
    if location.tracker is None:
        found.warning(
            root.location, f"no tracker file ({TRACKER}): Megatron finds no checkpoint in this folder"
        )
    elif location.tracker == TRACKER:
        text = root.read(TRACKER, 0, min(root.size(TRACKER), 64)).decode("utf-8", "replace").strip()
        is_number = text.isdecimal() and text.isascii()
        folder = f"iter_{int(text):07d}" if is_number else text
        if is_number and int(text) not in {number for _, number in iteration_folders(names)}:
            found.error(TRACKER, f"it names iteration {text}, but there is no folder {folder}")
        elif folder == text and text != "release":
            found.error(TRACKER, f"it holds {text[:40]!r}, expected an iteration or 'release'")
        elif text == "release" and text not in names:
            found.error(TRACKER, "it names 'release', but there is no such folder")
    for name in names:
        if name.endswith(PARTIAL_SUFFIX):
            found.warning(name, "an unfinished conversion; resume or delete it")
    if names_newer:
        _check_newer(location, root, found, judge)
    return found.done()


def number_fix(location: Location, stored: int) -> str:
    """How to fix a folder number that differs from the stored iteration."""
    name = f"iter_{stored:07d}"
    if location.root is not None and name in open_files(location.root).list():
        return f"find out which of the two is iteration {stored}: there is a folder {name} already"
    return f"if {stored} is right, rename the folder to {name} and let the tracker name it"


def _check_newer(location: Location, root: Files, found: Findings, judge: Callable[[str], str]) -> None:
    """Name the iterations behind the one that was verified: half-written ones, and ones the tracker is not at."""
    verified = location.iteration
    newer = [(name, n) for name, n in iteration_folders(root.list()) if verified is not None and n > verified]
    for name, number in newer:
        if root.exists(f"{name}/{METADATA}"):
            wrong = judge(name) if len(newer) <= _JUDGED else ""
            state = f", and {wrong}" if wrong else f"; see --iteration {number}"
            found.warning(name, f"it is newer than iteration {verified}, which was verified{state}")
        else:
            found.warning(
                name, f"it is newer and half-written: there is no {METADATA} in it, so its save did not end"
            )


def earlier_iteration(location: Location, root: Files | None) -> int | None:
    """The iteration of the run before this one that has its metadata: what to use in place of a damaged one."""
    if root is None or location.iteration is None:
        return None
    folders = [(number, name) for name, number in iteration_folders(root.list())]
    older = sorted((pair for pair in folders if pair[0] < location.iteration), reverse=True)
    return next((number for number, name in older if root.exists(f"{name}/{METADATA}")), None)


def check_metadata_json(files: Files) -> Check:
    """Whether every core release takes `metadata.json`: what it names decides which reader a job loads with."""
    found = Findings(METADATA_JSON, "fields")
    fields = json.loads(
        files.read(METADATA_JSON, 0, files.size(METADATA_JSON))
    )  # a dict: the backend was found
    found.looked_at = len(fields)
    for problem in metadata_json_problems(fields):
        found.error(METADATA_JSON, problem)
    for name in sorted(fields.keys() - set(_BACKENDS)):
        found.warning(METADATA_JSON, f"the field {name!r} is not known; core 0.18 and older refuse the file")
    return found.done()


def check_torch_dist_entries(location: Location, catalog: Catalog, common: CommonState) -> Check:
    """Whether the entries that a load asks for besides weights and states are there."""
    found = Findings("entries", "entries")
    found.looked_at = len(common.values)
    stored = location.has_common_pt or COMMON_OBJECT in catalog.objects  # if it can be read or not
    if not stored and not location.has_run_config:
        found.error(location.path, "neither common.pt nor common_state: no arguments, iteration or groups")
    if of_fsdp := fsdp_keys_problem(catalog.tensors):
        found.error(METADATA_JSON, of_fsdp)
    return found.done()


def check_fsdp_entries(location: Location, catalog: Catalog) -> Check:
    """Whether the entries that a strict load asks for besides weights and states are there, a field an object."""
    found = Findings("entries", "entries")
    found.looked_at = 3
    for key in ("iteration", "checkpoint_version"):
        if key not in catalog.objects:
            found.error(key, "the entry is missing; every loader asks for it")
    if "args" not in catalog.objects and not location.has_run_config:
        found.error("args", "the entry is missing; Megatron-LM loads nothing without it")
    for key in catalog.objects:
        is_whole_group = key.startswith(GROUP_META) and key.endswith((".weight", ".bias"))
        if key == "opt_param_scheduler" or is_whole_group:
            found.error(
                key,
                "a whole dict is stored as one object; torch's planner then renames every key of the load "
                "(its v2.3 compatibility). Store one object a field",
            )
    return found.done()
