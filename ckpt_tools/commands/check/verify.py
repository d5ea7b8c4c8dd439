"""`verify`: is a checkpoint whole and sound, and are its bytes the ones that were written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.errors import (
    NEVER_FINDINGS,
    CkptError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.locate.detect import (
    HELD_TWICE,
    NEXT_TO_RUN,
    TRACKER,
    Location,
    locate,
    other_copy,
)
from ckpt_tools.formats.locate.run_layouts import ForeignFormatError
from ckpt_tools.formats.safetensors import read_safetensors_catalog
from ckpt_tools.formats.storage.files import AnyPath, Files, LocalFiles, path_text
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.verify.report import Check, Findings, Meter, Report, VerifyOptions, failed_check

if TYPE_CHECKING:  # numpy, for who only looks at metadata
    from ckpt_tools.verify.content.content import Scanned


def verify_checkpoint(
    path: AnyPath,
    iteration: int | None = None,
    options: VerifyOptions | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Every check that makes sense for the checkpoint at `path`; `progress` gets (bytes done, bytes in all).

    Damage becomes findings of the report. `options.write_manifest` is written only when no check finds an error.

    Raises:
        UnsupportedCheckpointError: no checkpoint, or one of an unsupported kind.
        UsageError: the manifest to compare with is absent or is not one; the one to write exists.
        StorageError: the file system refuses to read.
    """
    path = path_text(path)
    options = options or VerifyOptions()
    manifest = _read_manifest(options)
    try:
        location = locate(path, iteration)
    except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
        if not open_files(path).exists(TRACKER):
            raise
        return Report(path, "unknown", (failed_check("place", path, error),), content_read=False)
    meter = Meter(progress)
    with closing(open_files(location.path)) as files:
        checks = (
            *_checks(_but(location, HELD_TWICE), files, options, manifest, meter),
            *_copy_check(location, options, meter),
        )
        is_read = options.content or options.manifest is not None
        return Report(location.path, location.kind, checks, is_read)


def _but(location: Location, ending: str) -> Location:
    """Without the line that the other form of the model is not read: both are."""
    left_out = tuple(line for line in location.left_out if not line.endswith(ending))
    return replace(location, left_out=left_out)


def _copy_check(location: Location, options: VerifyOptions, meter: Meter) -> Iterable[Check]:
    """One check of the same model in another form, where the folder holds it twice."""
    found = Findings("other copy", "checks")
    found.looked_at = 1
    try:
        copy = other_copy(location)
        if copy is None:
            return
        found.warning(
            location.path,
            f"it holds the model twice, as {location.kind} and as {copy.kind} in {copy.path}; both are checked",
        )
        with closing(open_files(copy.path)) as files:
            plain = replace(options, manifest=None, write_manifest=None)
            checks = _checks(_but(copy, NEXT_TO_RUN), files, plain, None, meter)
    except ForeignFormatError as error:
        found.warning(location.path, f"not checked, in the same folder as this model: {error}")
    except (CorruptCheckpointError, UnsupportedCheckpointError, UsageError) as error:
        found.failure(location.path, error)
    else:
        found.looked_at = len(checks)
        found.include(copy.path, checks)
    yield found.done()


def verify_checkpoints(
    paths: Iterable[str],
    iteration: int | None = None,
    options: VerifyOptions | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Report]:
    """A report for each of several paths; what is not a checkpoint is a report that says so."""
    options = options or VerifyOptions()
    if options.manifest is not None or options.write_manifest is not None:
        raise UsageError("a manifest is of one checkpoint; verify the others without it")
    reports = []
    for path in paths:
        try:
            reports.append(verify_checkpoint(path, iteration, options, progress))
        except (*NEVER_FINDINGS, UsageError):
            raise
        except CkptError as error:
            reports.append(Report(path, "unknown", (failed_check("place", path, error),), content_read=False))
    return reports


def _checks(
    location: Location, files: Files, options: VerifyOptions, manifest: object, meter: Meter
) -> list[Check]:
    try:
        if location.kind == "safetensors":
            catalog = read_safetensors_catalog(location.path)
        else:
            catalog = read_catalog(files, options.trust_pickle)
    except CorruptCheckpointError as error:
        return [failed_check("metadata", location.path, error)]
    digests = manifest is not None or options.write_manifest is not None
    pairs: Mapping[Item, Item] = {}
    if options.content and location.kind == "torch_dist":
        from ckpt_tools.execute.move.source_reader import has_stores
        from ckpt_tools.verify.content.content import master_pairs

        if not has_stores(files):  # what a store is asked for goes in the order of its files
            pairs = master_pairs(catalog)
    with _scanning(files, catalog, options, meter, pairs) as content:
        # Imported while workers read, which do without.
        from ckpt_tools.commands.check.verify_checks import check_metadata, masters_check
        from ckpt_tools.commands.job.opened import NO_STATE, Opened
        from ckpt_tools.megatron.format import FORMATS

        opened = Opened(location, files, catalog, NO_STATE, options.trust_pickle)
        checks = check_metadata(opened, options, digests, meter)
        # The model of any other layout may take reading whole buckets, which workers share.
        compare = masters_check(opened, options, 1) if pairs else None
        scanned = content(FORMATS[location.kind].squares(catalog) if options.content else ())
    if scanned:
        if compare is None:
            compare = masters_check(opened, options, options.workers)
        checks += scanned.checks
        said = {finding.message for check in checks for finding in check.findings}
        for check in compare(scanned):
            is_known = check.name == "masters" and {f.message for f in check.findings} <= said
            checks += [] if check.findings and is_known else [check]  # why the model cannot be read
    if digests:
        checks.append(_manifest(files, catalog, options, manifest, meter, not any(c.errors for c in checks)))
    return checks


def _scanning(
    files: Files, catalog: Catalog, options: VerifyOptions, meter: Meter, pairs: Mapping[Item, Item]
) -> AbstractContextManager[Callable[[Collection[str]], Scanned | None]]:
    """Gives what returns what was found in the content, if that was asked for; workers begin at once."""
    if not options.content:
        return nullcontext(lambda _: None)
    from ckpt_tools.verify.content.content import scanning

    return scanning(
        files,
        catalog,
        threads=options.threads,
        workers=options.workers,
        allow_nonfinite=options.allow_nonfinite,
        tick=meter,
        pairs=pairs,
    )


def _read_manifest(options: VerifyOptions) -> object:
    """The manifest to compare with, None for none; errors come before anything is read, also for one to write."""
    path, new = options.manifest, options.write_manifest
    if new is not None and new.exists():
        raise UsageError(f"{new} exists; delete it or choose another name. --manifest {new} compares with it")
    if path is None:
        return None
    from ckpt_tools.verify.content.manifest import read_manifest

    return read_manifest(path)


def _manifest(
    files: Files, catalog: Catalog, options: VerifyOptions, stored: object, meter: Meter, is_valid: bool
) -> Check:
    from ckpt_tools.verify.content.manifest import check_manifest, make_manifest

    if options.manifest is None and not is_valid:
        found = Findings("manifest", "digests")
        found.error(str(options.write_manifest), "not written: the checkpoint is not valid")
        return found.done()
    made = make_manifest(files, catalog, options.threads, options.workers, meter)
    found = Findings("manifest", "digests")
    found.looked_at = len(made["files"]) + len(made["tensors"])
    check = found.done() if options.manifest is None else check_manifest(stored, made)
    if options.write_manifest is not None and is_valid and not check.errors:
        from ckpt_tools.execute.output.access import write_report

        source = Path(files.location) if isinstance(files, LocalFiles) else None
        write_report(options.write_manifest, (json.dumps(made, indent=1) + "\n").encode(), source)
    return check
