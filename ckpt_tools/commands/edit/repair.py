"""`repair`: a copy of an `fsdp_dtensor` checkpoint with what stands under a wrong key put right, where it is proven.

The rest stays, byte for byte and chunk by chunk. Weights and masters keep their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_tools.commands.edit.mend_keys import Change, mend_keys, mended_target
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.rewrite import EditOptions, rewrite
from ckpt_tools.errors import UnsupportedCheckpointError
from ckpt_tools.execute.proof.masters import check_masters
from ckpt_tools.execute.run import WriteReport
from ckpt_tools.formats.torch_archive.item_reader import read_archive


@dataclass(frozen=True, slots=True)
class Repaired:
    """What `repair` did."""

    source: str
    output: str
    format: str
    changes: tuple[Change, ...]
    tensors: int
    objects: int
    written: WriteReport | None  # None: a dry run, or nothing to repair
    left_out: tuple[str, ...] = ()  # as of `Edited`


@dataclass(frozen=True, slots=True)
class RepairOptions(EditOptions):
    """How a repaired copy is made."""

    dry_run: bool = False  # find and prove everything, write nothing


def repair_checkpoint(
    source: str,
    output: str,
    options: RepairOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Repaired:
    """Write what the checkpoint at `source` was meant to be to `output`; `source` stays as it is.

    Where nothing is to be repaired, nothing is written and the report has no changes.

    Raises:
        UnsupportedCheckpointError: not `fsdp_dtensor`.
        MappingError: damage that is known and that nothing in the checkpoint can mend.
        VerificationError: nothing shows what is right.
        Otherwise the errors of opening, reading, planning and writing.
    """
    options = options or RepairOptions()
    with open_checkpoint(source, options.iteration, options.trust_pickle, of_run=True) as opened:
        if opened.location.kind == "fsdp_dtensor":
            return _repair_keys(source, output, opened, options, progress)
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is {opened.location.kind}. repair corrects keys of fsdp_dtensor checkpoints and "
            "nothing else: it changes no weights and no masters. `verify --content` shows what is damaged; use "
            "another iteration, or a copy of the damaged file"
        )


def _repair_keys(
    source: str,
    output: str,
    opened: Opened,
    options: RepairOptions,
    progress: Callable[[int, int], None] | None,
) -> Repaired:
    catalog, files = opened.catalog, opened.files

    def archive(key: str) -> bytes:
        return read_archive(files, catalog.objects[key].item)

    made = mend_keys(catalog, opened.common, lambda a, b: archive(a) == archive(b))
    if not made.changes:
        return _nothing(source, output, opened)
    advice = "They cannot take its place: a checkpoint that is half of another step cannot be repaired."
    check_masters(files, catalog, made.must_round, "all", threads=options.write.threads, advice=advice)
    target = mended_target(catalog, made)
    blobs = ((name, archive(key)) for key, name in made.names.items() if key in catalog.objects)
    written = None
    if not options.dry_run:
        written = rewrite(source, opened, output, target, blobs, options, progress=progress)
    return Repaired(
        source,
        output,
        "fsdp_dtensor",
        tuple(made.changes),
        len(target.tensors),
        len(target.objects),
        written,
        opened.location.left_out,
    )


def _nothing(source: str, output: str, opened: Opened) -> Repaired:
    """Of a sound checkpoint, as far as is known: it is left where it is."""
    return Repaired(source, output, opened.location.kind, (), 0, 0, None, opened.location.left_out)
