"""`repair`: a copy of an `fsdp_dtensor` checkpoint with what stands under a wrong key put right, where it is proven.

The rest stays, byte for byte and chunk by chunk. Weights and masters keep their values.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.commands.edit.mend_keys import Change, MendedKeys, mend_keys, mended_target
from ckpt_tools.commands.job.conversion import (
    Conversion,
    EditOptions,
    Progress,
    Writer,
    carry_out,
    like_to_like,
    open_source,
)
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.report import ConversionReport, Edits
from ckpt_tools.commands.job.rewrite import rewrite
from ckpt_tools.errors import UnsupportedCheckpointError
from ckpt_tools.formats.torch_archive.item_reader import read_archive

RepairOptions = EditOptions


@dataclass(frozen=True, slots=True)
class Repaired:
    """What `repair` did."""

    source: str
    output: str
    changes: tuple[Change, ...]
    left_out: tuple[str, ...]  # a line for each thing beside the source's tensors that stays behind
    report: ConversionReport | None  # None: there is nothing to repair


def repair_checkpoint(
    source: str,
    output: str,
    options: RepairOptions | None = None,
    progress: Progress | None = None,
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
    with open_source(source, options) as opened:
        location, catalog, files = opened.location, opened.catalog, opened.files
        if location.kind != "fsdp_dtensor":
            raise UnsupportedCheckpointError(
                f"{location.path} is {location.kind}. repair corrects keys of fsdp_dtensor checkpoints and nothing "
                "else: it changes no weights and no masters. `verify --content` shows what is damaged; use another "
                "iteration, or a copy of the damaged file"
            )

        def is_same(a: str, b: str) -> bool:
            return read_archive(files, catalog.objects[a].item) == read_archive(
                files, catalog.objects[b].item
            )

        made, done = mend_keys(catalog, opened.common, is_same), None
        if made.changes:
            writer = Writer(open_source, like_to_like, lambda opened, _options, _world: _plan(opened, made))
            done = carry_out(source, opened, output, writer, options, progress, options.dry_run)
    return Repaired(source, output, tuple(made.changes), location.left_out, done)


def _plan(opened: Opened, made: MendedKeys) -> Conversion:
    stored = opened.catalog.objects
    archives = (
        (name, read_archive(opened.files, stored[key].item))
        for key, name in made.names.items()
        if key in stored
    )
    return rewrite(
        opened,
        mended_target(opened.catalog, made),
        archives,
        Edits(),
        masters="as_stored",
        must_round=made.must_round,
        check_masters="all",
        advice="They cannot take its place: a checkpoint that is half of another step cannot be repaired.",
    )
