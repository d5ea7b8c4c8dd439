"""`verify`: is a checkpoint whole and sound, and are its bytes the ones that were written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.catalog.dcp import read_catalog
from ckpt_tools.catalog.detect import TRACKER, Location, locate
from ckpt_tools.catalog.files import Files, open_files
from ckpt_tools.catalog.model import Catalog
from ckpt_tools.catalog.safetensors import read_safetensors_catalog
from ckpt_tools.errors import (
    CkptError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.megatron.common_state import CommonState, read_common_state
from ckpt_tools.megatron.optimizer_layouts.kinds import optimizer_layout
from ckpt_tools.megatron.source import read_torch_dist, stored_groups
from ckpt_tools.megatron.target import TargetTensor
from ckpt_tools.model.model import MASTER, WEIGHT, Model
from ckpt_tools.verify import meaning
from ckpt_tools.verify.meter import Meter
from ckpt_tools.verify.place import check_entries, check_place
from ckpt_tools.verify.report import Check, Findings, Report
from ckpt_tools.verify.structure import all_items, check_files, check_frames, check_tiling


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """How much to look at."""

    content: bool = False  # read every byte
    manifest: Path | None = None  # written when absent, checked when there
    allow_nonfinite: bool = False
    trust_pickle: bool = False
    threads: int = 2


def verify_checkpoint(
    path: str,
    iteration: int | None = None,
    options: VerifyOptions | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Every check that makes sense for the checkpoint at `path`; `progress` is told (bytes done, bytes in all).

    Damage becomes findings of the report. `options.manifest` is written only when no check finds an error.

    Raises:
        UnsupportedCheckpointError: there is no checkpoint, or one of a kind that is not read.
        UsageError: the manifest is none.
        StorageError: the file system refuses to read.
    """
    options = options or VerifyOptions()
    try:
        location = locate(path, iteration)
    except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
        if not open_files(path).exists(TRACKER):
            raise
        return Report(path, "unknown", (_failed("place", path, error),))
    files = open_files(location.path)
    try:
        return Report(location.path, location.kind, tuple(_checks(location, files, options, Meter(progress))))
    finally:
        files.close()


def _checks(location: Location, files: Files, options: VerifyOptions, meter: Meter) -> list[Check]:
    try:
        catalog = _read_catalog(location, files, options)
    except CorruptCheckpointError as error:
        return [_failed("metadata", location.path, error)]
    passes = options.content + 2 * (options.manifest is not None)  # a manifest reads files and tensors
    meter.total = passes * sum(item.length for _, item in all_items(catalog))
    checks = []
    common = CommonState({}, None)
    if location.kind != "safetensors":
        try:
            common = read_common_state(files, catalog, options.trust_pickle)
        except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
            checks.append(_failed("common state", location.path, error))
    checks.append(_place(location, common))
    checks += [check_tiling(catalog), check_files(files, catalog)]
    checks.append(check_frames(files, catalog, options.trust_pickle))
    checks += _meaning(location, files, catalog, common)
    if options.content:
        checks += _content(location, files, catalog, options, meter)
    if options.manifest is not None:
        checks.append(_manifest(files, catalog, options, meter, all(check.errors == 0 for check in checks)))
    return checks


def _read_catalog(location: Location, files: Files, options: VerifyOptions) -> Catalog:
    if location.kind == "safetensors":
        return read_safetensors_catalog(location.path)
    return read_catalog(files, options.trust_pickle)


def _place(location: Location, common: CommonState) -> Check:
    root = open_files(location.root) if location.root is not None else None
    try:
        return check_place(location, root, common)
    finally:
        if root is not None:
            root.close()


def _meaning(location: Location, files: Files, catalog: Catalog, common: CommonState) -> list[Check]:
    """The checks of what keys mean, for the formats whose keys have a meaning."""
    if location.kind not in ("torch_dist", "fsdp_dtensor"):
        return []
    checks = [check_entries(location, catalog, common)]
    if location.kind == "fsdp_dtensor":
        weights, problems = meaning.fsdp_weights(catalog), list[str]()
        checks += [meaning.check_fsdp_states(catalog), meaning.check_fsdp_groups(catalog)]
    else:
        weights, problems = meaning.torch_dist_weights(catalog)
        checks += [meaning.check_torch_dist_states(catalog, common), _groups(files, catalog, common)]
    return [
        *checks,
        meaning.check_layers(weights, problems, common),
        meaning.check_experts(weights, common),
    ]


def _groups(files: Files, catalog: Catalog, common: CommonState) -> Check:
    try:
        groups = stored_groups(files, catalog, common)
    except CkptError as error:
        return _failed("groups", "optimizer", error)
    has_states = optimizer_layout(catalog, common) != "none"
    return meaning.check_torch_dist_groups(
        has_states, groups, meaning.has_step(common.values.get("optimizer"))
    )


def _content(
    location: Location, files: Files, catalog: Catalog, options: VerifyOptions, meter: Meter
) -> list[Check]:
    from ckpt_tools.verify.content import scan_content

    checks = list(
        scan_content(
            files, catalog, threads=options.threads, allow_nonfinite=options.allow_nonfinite, tick=meter
        )
    )
    if location.kind == "torch_dist":
        checks.append(_masters(files, catalog, options))
    return checks


def _masters(files: Files, catalog: Catalog, options: VerifyOptions) -> Check:
    """Whether every fp32 master rounds to its stored weight."""
    from ckpt_tools.execute.check_masters import compare_masters

    found = Findings("masters", "elements")
    try:
        source = read_torch_dist(files, catalog, ("*",), options.trust_pickle)
        targets = master_targets(source.model)
        report, problems = compare_masters(
            files, source.model.catalog, targets, "all", threads=options.threads
        )
    except StorageError:
        raise
    except CkptError as error:
        found.error("optimizer", str(error))
        return found.done()
    found.looked_at = report.elements
    for problem in problems:
        element, _, values = problem.partition(": ")
        found.error(element, f"{values}: the master does not round to the weight")
    return found.done()


def master_targets(model: Model) -> list[TargetTensor]:
    """The fp32 master of every parameter that has one, with the stored weight it must round to."""
    return [
        TargetTensor(
            p.name if p.expert is None else f"{p.name} of expert {p.expert}",
            p.values[MASTER].dtype,
            p.shape,
            p.values[MASTER].sources,
            must_round_to=p.values[WEIGHT].sources,
            must_round_dtype=p.values[WEIGHT].dtype,
        )
        for p in model.parameters
        if MASTER in p.values
    ]


def _manifest(files: Files, catalog: Catalog, options: VerifyOptions, meter: Meter, is_valid: bool) -> Check:
    from ckpt_tools.verify.manifest import check_manifest, make_manifest

    path = options.manifest
    assert path is not None  # the caller asked
    if path.exists():
        try:
            stored = json.loads(path.read_bytes())
        except ValueError as error:
            raise UsageError(f"{path} exists and is no manifest ({error}); choose another file") from None
        return check_manifest(stored, make_manifest(files, catalog, options.threads, meter))
    found = Findings("manifest", "digests")
    if not is_valid:
        found.error(str(path), "not written: the checkpoint is not valid")
        return found.done()
    made = make_manifest(files, catalog, options.threads, meter)
    found.looked_at = len(made["files"]) + len(made["tensors"])
    path.write_text(json.dumps(made, indent=1) + "\n")
    return found.done()


def _failed(check: str, where: str, error: CkptError) -> Check:
    found = Findings(check, "checkpoints")
    found.looked_at = 1
    found.error(where, str(error))
    return found.done()
