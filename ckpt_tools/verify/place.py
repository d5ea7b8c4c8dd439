"""Do the folder, the tracker file and the entries beside the weights make loaders find and accept the checkpoint."""

from __future__ import annotations

from ckpt_tools.catalog.detect import METADATA_JSON, TRACKER, Location
from ckpt_tools.catalog.files import Files
from ckpt_tools.catalog.model import Catalog
from ckpt_tools.megatron.common_state import CommonState
from ckpt_tools.verify.report import Check, Findings

PARTIAL_SUFFIX = ".ckpt_tools-partial"


def check_place(location: Location, root: Files | None, common: CommonState) -> Check:
    """Whether the tracker names a checkpoint that exists, and the folder's number is the stored iteration."""
    found = Findings("place", "folders")
    found.looked_at = 1 if root is None else 2
    stored = common.iteration
    if location.iteration is not None and stored is not None and stored != location.iteration:
        found.error(location.path, f"the folder says iteration {location.iteration}, the checkpoint {stored}")
    if root is None:
        return found.done()
    names = root.list()
    if location.tracker is None:
        found.warning(
            root.location, f"no tracker file ({TRACKER}): Megatron finds no checkpoint in this folder"
        )
    elif location.tracker == TRACKER:
        text = root.read(TRACKER, 0, min(root.size(TRACKER), 64)).decode("utf-8", "replace").strip()
        folder = f"iter_{int(text):07d}" if text.isdecimal() and text.isascii() else text
        if folder != text and folder not in names:
            found.error(TRACKER, f"it names iteration {text}, but there is no folder {folder}")
        elif folder == text and text != "release":
            found.error(TRACKER, f"it holds {text[:40]!r}, expected an iteration or 'release'")
        elif text == "release" and text not in names:
            found.error(TRACKER, "it names 'release', but there is no such folder")
    for name in names:
        if name.endswith(PARTIAL_SUFFIX):
            found.warning(name, "an unfinished conversion; resume or delete it")
    return found.done()


def check_entries(location: Location, catalog: Catalog, common: CommonState) -> Check:
    """Whether the entries that a strict load asks for beside weights and states are there."""
    found = Findings("entries", "entries")
    if location.kind == "torch_dist":
        found.looked_at = len(common.values)
        if common.source is None and not location.has_run_config:
            found.error(
                location.path, "neither common.pt nor common_state: no arguments, iteration or groups"
            )
        if any(key.startswith("model.module.") for key in catalog.tensors):
            found.error(
                METADATA_JSON,
                "the keys are those of fsdp_dtensor, but this file makes loaders take the folder for torch_dist; "
                "remove the file",
            )
    if location.kind == "fsdp_dtensor":
        found.looked_at = 3
        for key in ("iteration", "checkpoint_version"):
            if key not in catalog.objects:
                found.error(key, "the entry is missing; every loader asks for it")
        if "args" not in catalog.objects and not location.has_run_config:
            found.error("args", "the entry is missing; Megatron-LM loads nothing without it")
        for key in catalog.objects:
            if key == "opt_param_scheduler" or (
                key.startswith("optimizer.param_to_group_meta.") and key.endswith((".weight", ".bias"))
            ):
                found.error(
                    key,
                    "a whole dict is stored as one object; torch's planner then renames every key of the load "
                    "(its v2.3 compatibility). Store one object a field",
                )
    return found.done()
