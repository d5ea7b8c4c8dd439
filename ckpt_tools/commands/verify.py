"""`verify`: is a checkpoint whole and sound, and are its bytes the ones that were written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_tools.commands.opened import Opened
from ckpt_tools.commands.read_model import Wanted, read_model, shared_by
from ckpt_tools.errors import (
    CkptError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.execute.access import write_report
from ckpt_tools.formats.dcp import read_catalog
from ckpt_tools.formats.detect import TRACKER, Location, locate
from ckpt_tools.formats.files import AnyPath, Files, LocalFiles, open_files, path_text
from ckpt_tools.formats.safetensors import read_safetensors_catalog
from ckpt_tools.megatron.common_state import CommonState, read_common_state
from ckpt_tools.megatron.dcp.state_dict import is_megatron, read_state_dict
from ckpt_tools.megatron.torch_dist.optimizer_layouts.kinds import optimizer_layout
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import coalesced_buffers
from ckpt_tools.megatron.torch_dist.read import read_torch_dist, stored_groups
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.model import Model
from ckpt_tools.verify import meaning
from ckpt_tools.verify.integrity import INTEGRITY, check_integrity
from ckpt_tools.verify.meter import Meter
from ckpt_tools.verify.packing import check_packing
from ckpt_tools.verify.place import check_entries, check_metadata_json, check_place, earlier_iteration
from ckpt_tools.verify.plain_states import check_plain_groups, check_plain_states
from ckpt_tools.verify.report import ERROR, Check, Findings, Report
from ckpt_tools.verify.structure import (
    all_items,
    check_files,
    check_frames,
    check_planner,
    check_plans,
    check_shards,
    check_tiling,
)


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """How much to look at."""

    content: bool = False  # read every byte
    manifest: Path | None = None  # compared with
    allow_nonfinite: bool = False
    trust_pickle: bool = False
    threads: int = 2
    workers: int | None = None  # processes forked on this machine; None: as many as help
    write_manifest: Path | None = None  # made, when the checkpoint is valid
    against: str | None = None  # what it was exported or imported from: the accounts of both are compared
    rules: Path | None = None  # a rule file, with `against`
    every_iteration: bool = False  # of its run is verified: newer ones are not pointed at
    ignore_keys: tuple[str, ...] = ()  # with `against`: what the export left out of its source


def verify_checkpoint(
    path: AnyPath,
    iteration: int | None = None,
    options: VerifyOptions | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Every check that makes sense for the checkpoint at `path`; `progress` is told (bytes done, bytes in all).

    Damage becomes findings of the report. `options.write_manifest` is written only when no check finds an error.

    Raises:
        UnsupportedCheckpointError: there is no checkpoint, or one of a kind that is not read.
        UsageError: the manifest to compare with is absent or is not one; the one to write exists; `against` is not
            the other side of an export.
        StorageError: the file system refuses to read.
    """
    path = path_text(path)
    options = options or VerifyOptions()
    if options.against is None and (options.rules is not None or options.ignore_keys):
        raise UsageError("--rules and --ignore-keys are those of an export: they go with --against")
    manifest = _read_manifest(options)
    of_other = None
    if options.against is not None and iteration is not None:
        iteration, of_other = _iterations(path, iteration)
    try:
        location = locate(path, iteration)
    except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
        if not open_files(path).exists(TRACKER):
            raise
        return Report(path, "unknown", (_failed("place", path, error),), content_read=False)
    files = open_files(location.path)
    try:
        checks = tuple(_checks(location, files, options, manifest, Meter(progress)))
        is_read = options.content or options.manifest is not None
        report = Report(location.path, location.kind, checks, is_read)
        return report if options.against is None else _audited(report, options, of_other)
    finally:
        files.close()


def _iterations(path: str, iteration: int) -> tuple[int | None, int | None]:
    """Of which of two sides an iteration is meant: a Hugging Face model has none."""
    try:
        is_model = locate(path).kind == "safetensors"
    except CkptError:  # told when it is located with the iteration
        is_model = False
    return (None, iteration) if is_model else (iteration, None)


def _audited(report: Report, options: VerifyOptions, iteration: int | None) -> Report:
    """The report with the accounts of the checkpoint and of the other side."""
    from ckpt_tools.commands.audit import audit_places

    assert options.against is not None  # asked for
    if any(check.name == "metadata" for check in report.checks):
        return report  # nothing that could be counted
    rules, ignored = options.rules, options.ignore_keys
    return audit_places(report, options.against, iteration, rules, ignored, options.trust_pickle)


def verify_checkpoints(
    paths: Iterable[str],
    iteration: int | None = None,
    options: VerifyOptions | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Report]:
    """A report for each of several paths; what is not a checkpoint is a report that says so.

    Raises:
        UsageError: a manifest or a source belongs to one checkpoint.
        StorageError: the file system refuses to read.
    """
    options = options or VerifyOptions()
    if options.manifest is not None or options.write_manifest is not None:
        raise UsageError("a manifest is of one checkpoint; verify the others without it")
    if options.against is not None:
        raise UsageError("--against is for one checkpoint and its source; verify the others without it")
    reports = []
    for path in paths:
        try:
            reports.append(verify_checkpoint(path, iteration, options, progress))
        except (StorageError, UsageError):
            raise
        except CkptError as error:
            reports.append(Report(path, "unknown", (_failed("place", path, error),), content_read=False))
    return reports


def _checks(
    location: Location, files: Files, options: VerifyOptions, manifest: object, meter: Meter
) -> list[Check]:
    try:
        catalog = _read_catalog(location, files, options)
    except CorruptCheckpointError as error:
        return [_failed("metadata", location.path, error)]
    has_integrity = files.exists(INTEGRITY)
    passes = options.content * (1 + has_integrity)
    passes += 2 * (options.manifest is not None or options.write_manifest is not None)  # files and tensors
    meter.total = passes * sum(item.length for _, item in all_items(catalog))
    checks = []
    common = CommonState({}, None)
    if location.kind != "safetensors":
        try:
            common = read_common_state(files, catalog, options.trust_pickle)
        except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
            checks.append(_failed("common state", location.path, error))
    checks.append(_place(location, common, not options.every_iteration))
    checks += [check_tiling(catalog), check_planner(catalog), check_shards(catalog)]
    if location.kind != "safetensors":
        checks.append(check_plans(files, options.trust_pickle))
    checks.append(_with_way_out(location, check_files(files, catalog)))
    checks.append(check_frames(files, catalog, options.trust_pickle))
    if location.has_metadata_json:
        checks.append(check_metadata_json(files))
    if has_integrity:
        checks.append(check_integrity(files, options.content, meter))
    checks += _meaning(location, files, catalog, common, options)
    if options.content:
        checks += _content(location, files, catalog, options, meter)
    if manifest is not None or options.write_manifest is not None:
        checks.append(_manifest(files, catalog, options, manifest, meter, not any(c.errors for c in checks)))
    return checks


def _read_catalog(location: Location, files: Files, options: VerifyOptions) -> Catalog:
    if location.kind == "safetensors":
        return read_safetensors_catalog(location.path)
    return read_catalog(files, options.trust_pickle)


def _place(location: Location, common: CommonState, names_newer: bool) -> Check:
    root = open_files(location.root) if location.root is not None else None
    try:
        return check_place(location, root, common, names_newer)
    finally:
        if root is not None:
            root.close()


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
    location: Location, files: Files, catalog: Catalog, common: CommonState, options: VerifyOptions
) -> list[Check]:
    """The checks of what keys mean, for the formats whose keys have a meaning."""
    if location.kind == "dcp":
        return _plain_meaning(files, catalog, common, options)
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
    ]


def _plain_meaning(
    files: Files, catalog: Catalog, common: CommonState, options: VerifyOptions
) -> list[Check]:
    """The checks of a plain state dict: its optimizers', and those of Megatron's names."""
    found = read_state_dict(catalog)
    checks = list[Check]()
    if found.optimizers:
        checks.append(check_plain_states(files, catalog, found, options.trust_pickle))
        checks.append(check_plain_groups(files, catalog, found, options.trust_pickle))
    if is_megatron(found):
        weights = [meaning.Weight(name, catalog.tensors[key].shape) for name, key in found.weights.items()]
        checks += [meaning.check_layers(weights, [], common), meaning.check_experts(weights, common)]
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
        checks.append(_failed("groups", "optimizer", error))
    try:
        if layout == "dp_zero_gather_scatter":
            buckets = [bucket for buffer in coalesced_buffers(files, catalog) for bucket in buffer.buckets]
            inside = {kind for bucket in buckets for kind in bucket.states}
        states = meaning.check_torch_dist_states(catalog, common, groups, inside)
    except CkptError as error:
        states = _failed("states", "optimizer", error)
    return [states, *checks]


def _content(
    location: Location, files: Files, catalog: Catalog, options: VerifyOptions, meter: Meter
) -> list[Check]:
    from ckpt_tools.verify.content import scan_content

    checks = list(
        scan_content(
            files,
            catalog,
            threads=options.threads,
            workers=options.workers,
            allow_nonfinite=options.allow_nonfinite,
            tick=meter,
        )
    )
    if location.kind == "torch_dist":
        read = partial(_stored_model, files, catalog, options)
    elif location.kind == "dcp" and any(one.masters for one in read_state_dict(catalog).optimizers):
        read = partial(_plain_model, location, files, catalog, options)
    else:
        return checks
    from ckpt_tools.commands.verify_masters import check_all_masters

    checks.append(check_all_masters(files, read, options.threads, options.workers))
    return checks


def _stored_model(files: Files, catalog: Catalog, options: VerifyOptions) -> Model:
    return read_torch_dist(
        files,
        catalog,
        trust_pickle=options.trust_pickle,
        unknown_keys=True,
        share=shared_by(options.workers),
    ).model


def _plain_model(location: Location, files: Files, catalog: Catalog, options: VerifyOptions) -> Model:
    common = read_common_state(files, catalog, options.trust_pickle)
    return read_model(Opened(location, files, catalog, common, options.trust_pickle), Wanted("masters"))


def _read_manifest(options: VerifyOptions) -> object:
    """The manifest to compare with, None for none; told before anything is read, as is one that cannot be written.

    Raises:
        UsageError: it is absent or not JSON, or the one to write is there already.
    """
    path, new = options.manifest, options.write_manifest
    if new is not None and new.exists():
        raise UsageError(f"{new} exists; delete it or choose another name. --manifest {new} compares with it")
    if path is None:
        return None
    from ckpt_tools.verify.manifest import read_manifest

    return read_manifest(path)


def _manifest(
    files: Files, catalog: Catalog, options: VerifyOptions, stored: object, meter: Meter, is_valid: bool
) -> Check:
    from ckpt_tools.verify.manifest import check_manifest, make_manifest

    if options.manifest is None and not is_valid:
        found = Findings("manifest", "digests")
        found.error(str(options.write_manifest), "not written: the checkpoint is not valid")
        return found.done()
    made = make_manifest(files, catalog, options.threads, options.workers, meter)
    found = Findings("manifest", "digests")
    found.looked_at = len(made["files"]) + len(made["tensors"])
    check = found.done() if options.manifest is None else check_manifest(stored, made)
    if options.write_manifest is not None and is_valid and not check.errors:
        source = Path(files.location) if isinstance(files, LocalFiles) else None
        write_report(options.write_manifest, (json.dumps(made, indent=1) + "\n").encode(), source)
    return check


def _failed(check: str, where: str, error: CkptError) -> Check:
    found = Findings(check, "checkpoints")
    found.looked_at = 1
    found.failure(where, error)
    return found.done()
