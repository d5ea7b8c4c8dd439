"""`verify` without `--content`: the checks of what metadata says, and of the small files beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from ckpt_tools.commands.huggingface.hf_assets import documents_of
from ckpt_tools.commands.huggingface.hf_parts import without_frequencies
from ckpt_tools.commands.look.ls import COMPLETE, iteration_row
from ckpt_tools.errors import (
    CkptError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import Files, path_in
from ckpt_tools.formats.storage.open_files import files_below, open_files
from ckpt_tools.megatron.dcp.state_dict import is_megatron, read_state_dict
from ckpt_tools.megatron.run_state.common_state import CommonState, read_common_state
from ckpt_tools.megatron.run_state.record import RECORD_FILE, read_record
from ckpt_tools.megatron.torch_dist.optimizer_layouts.kinds import optimizer_layout
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import coalesced_buffers
from ckpt_tools.megatron.torch_dist.read import stored_groups
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.verify.checkpoint import meaning
from ckpt_tools.verify.checkpoint.counters import check_counters
from ckpt_tools.verify.checkpoint.hf_folder import check_hf_folder
from ckpt_tools.verify.checkpoint.packing import check_packing
from ckpt_tools.verify.checkpoint.place import (
    check_entries,
    check_metadata_json,
    check_place,
    earlier_iteration,
)
from ckpt_tools.verify.checkpoint.plain_states import check_plain_groups, check_plain_states
from ckpt_tools.verify.checkpoint.settings_fit import check_settings
from ckpt_tools.verify.checkpoint.structure import (
    all_items,
    check_files,
    check_frames,
    check_planner,
    check_plans,
    check_shards,
    check_tiling,
)
from ckpt_tools.verify.content.integrity import INTEGRITY, check_integrity
from ckpt_tools.verify.content.meter import Meter
from ckpt_tools.verify.report import ERROR, Check, failed_check


def check_metadata(
    location: Location,
    files: Files,
    catalog: Catalog,
    trust_pickle: bool,
    content: bool,
    digests: bool,
    names_newer: bool,
    meter: Meter,
) -> list[Check]:
    """Every check that looks at no values. The sums of `integrity.json` alone are taken with `content`.

    `meter` is told how many bytes all checks will read: with `digests`, a manifest's too.
    `names_newer` is whether newer iterations of the run are pointed at.
    """
    has_integrity = files.exists(INTEGRITY)
    passes = content * (1 + has_integrity) + 2 * digests  # of files and tensors
    meter.total = passes * sum(item.length for _, item in all_items(catalog))
    checks = []
    common = CommonState({}, None)
    if location.kind != "safetensors":
        try:
            common = read_common_state(files, catalog, trust_pickle)
        except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
            checks.append(failed_check("common state", location.path, error))
        if location.kind != "fsdp_dtensor":  # whose packing depends on it
            try:
                read_record(files)
            except CorruptCheckpointError as error:
                checks.append(failed_check("record", RECORD_FILE, error))
    checks.append(_place(location, common, names_newer, trust_pickle))
    checks += [check_tiling(catalog), check_planner(catalog), check_shards(catalog)]
    if location.kind != "safetensors":
        checks.append(check_plans(files, trust_pickle))
    checks.append(_with_way_out(location, check_files(files, catalog)))
    checks.append(check_frames(files, catalog, trust_pickle))
    if location.kind == "safetensors":
        checks += check_hf_folder(files, without_frequencies(catalog)[0], documents_of(files.list()))
    if location.has_metadata_json:
        checks.append(check_metadata_json(files))
    if has_integrity:
        checks.append(check_integrity(files, content, meter))
    return checks + _meaning(location, files, catalog, common, trust_pickle)


def _place(location: Location, common: CommonState, names_newer: bool, trust_pickle: bool) -> Check:
    root = open_files(location.root) if location.root is not None else None
    try:
        judge = partial(_wrong_with, location.root or "", trust_pickle)
        return check_place(location, root, common, names_newer, judge)
    finally:
        if root is not None:
            root.close()


def _wrong_with(root: str, trust_pickle: bool, name: str) -> str:
    """What `ls` finds wrong with an iteration; "" in a store, where each look costs, and where it cannot look."""
    if "://" in root:
        return ""
    place = path_in(root, name)
    try:
        row = iteration_row(name, place, None, files_below(place), trust_pickle)
    except (StorageError, UsageError):  # it is another iteration that was asked for
        return ""
    return "" if row.state == COMPLETE else f"{row.state}: {row.why}"


def _with_way_out(location: Location, check: Check) -> Check:
    """The check of files, with the run's earlier iteration that can be used in place of a damaged one."""
    if not check.errors or location.root is None:
        return check
    with closing(open_files(location.root)) as root:
        earlier = earlier_iteration(location, root)
    if earlier is None:
        return check
    way_out = f"another copy of the file, or an earlier iteration (--iteration {earlier})"
    findings = (f._replace(fix=way_out) if f.severity == ERROR else f for f in check.findings)
    return replace(check, findings=tuple(findings))


def _meaning(
    location: Location, files: Files, catalog: Catalog, common: CommonState, trust_pickle: bool
) -> list[Check]:
    """The checks of what keys mean, for the formats whose keys have a meaning."""
    if location.kind == "dcp":
        return _plain_meaning(files, catalog, common, trust_pickle)
    if location.kind not in ("torch_dist", "fsdp_dtensor"):
        return []
    checks = [check_entries(location, catalog, common)]
    stages = None
    if location.kind == "fsdp_dtensor":
        weights, problems = meaning.fsdp_weights(catalog), list[str]()
        stages = meaning.stage_numbers(catalog, common)
        checks += [meaning.check_fsdp_states(catalog, common), meaning.check_fsdp_groups(catalog)]
        checks.append(check_packing(files, catalog, common))
    else:
        weights, problems = meaning.torch_dist_weights(catalog)
        checks += _torch_dist_optimizer(files, catalog, common)
    return [
        *checks,
        meaning.check_layers(weights, problems, common, stages),
        meaning.check_experts(weights, common),
        check_settings(location.kind, weights, common),
        check_counters(files, catalog, common, trust_pickle),
    ]


def _plain_meaning(files: Files, catalog: Catalog, common: CommonState, trust_pickle: bool) -> list[Check]:
    """The checks of a plain state dict: its optimizers', and those of Megatron's names."""
    found = read_state_dict(catalog)
    checks = list[Check]()
    if found.optimizers:
        checks.append(check_plain_states(files, catalog, found, trust_pickle))
        checks.append(check_plain_groups(files, catalog, found, trust_pickle))
    if is_megatron(found):
        weights = [meaning.Weight(name, catalog.tensors[key].shape) for name, key in found.weights.items()]
        checks += [meaning.check_layers(weights, [], common), meaning.check_experts(weights, common)]
        checks.append(check_counters(files, catalog, common, trust_pickle))
    return checks


def _torch_dist_optimizer(files: Files, catalog: Catalog, common: CommonState) -> list[Check]:
    """The checks of optimizer states and groups."""
    layout = optimizer_layout(catalog, common)
    checks, groups, inside = list[Check](), tuple[Mapping[str, Any], ...](), set[str]()
    try:
        groups = stored_groups(files, catalog, common)
        has_step = meaning.has_step(common.values.get("optimizer"))
        checks.append(meaning.check_torch_dist_groups(layout != "none", groups, has_step))
    except CkptError as error:
        checks.append(failed_check("groups", "optimizer", error))
    try:
        if layout == "dp_zero_gather_scatter":
            buckets = [bucket for buffer in coalesced_buffers(files, catalog) for bucket in buffer.buckets]
            inside = {kind for bucket in buckets for kind in bucket.states}
        states = meaning.check_torch_dist_states(catalog, common, groups, inside)
    except CkptError as error:
        states = failed_check("states", "optimizer", error)
    return [states, *checks]
