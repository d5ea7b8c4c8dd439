"""`repair`: a sound copy of a checkpoint with damage that upstream programs are known to leave, where it is proven.

`fsdp_dtensor`: what stands under a wrong key (`mend_keys`); the rest stays, byte for byte and chunk by chunk.
`torch_dist`: weights that do not round from their masters (`mend_weights`); what is written has the
`fully_reshardable` layout, whatever the source's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ckpt_tools.commands.conversion import Conversion
from ckpt_tools.commands.mend_keys import Change, mend_keys, mended_target
from ckpt_tools.commands.mend_weights import Damage, find_damage, mended, refuse_unproven
from ckpt_tools.commands.opened import Opened, open_checkpoint
from ckpt_tools.commands.outputs import choose_output
from ckpt_tools.commands.read_model import Wanted, read_model
from ckpt_tools.commands.rewrite import EditOptions, rewrite
from ckpt_tools.commands.to_torch_dist import write_torch_dist
from ckpt_tools.errors import UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.check_masters import check_masters
from ckpt_tools.execute.ranks import Ranks
from ckpt_tools.execute.rehearse import rehearse
from ckpt_tools.execute.run import WriteReport, write_checkpoint
from ckpt_tools.execute.workers import shared_out
from ckpt_tools.formats.container import read_archive
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from ckpt_tools.model.roles import MASTER

_BY_WORD = "the masters are right: --trust-masters says so"
_PROOFS = {
    "checksum": "the weights have other checksums than their writer stored, their masters the right ones",
    "not-a-number": "wherever the weights are finite numbers they round from their masters, all of which are finite",
}


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

    trust_masters: bool = False  # masters are right where only their difference to the weights is known
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
        UsageError: there are no masters that weights could be repaired from.
        UnsupportedCheckpointError: neither `torch_dist` nor `fsdp_dtensor`.
        MappingError: damage that is known and that nothing in the checkpoint can mend.
        VerificationError: nothing shows what is right.
        Otherwise the errors of opening, reading, planning and writing.
    """
    options = options or RepairOptions()
    with open_checkpoint(source, options.iteration, options.trust_pickle) as opened:
        kind = opened.location.kind
        if kind == "fsdp_dtensor":
            return _repair_keys(source, output, opened, options, progress)
        if kind == "torch_dist":
            return _repair_weights(source, output, opened, options, progress)
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is {kind}; repair knows the damage of torch_dist and fsdp_dtensor checkpoints"
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


def _repair_weights(
    source: str,
    output: str,
    opened: Opened,
    options: RepairOptions,
    progress: Callable[[int, int], None] | None,
) -> Repaired:
    model = read_model(opened, Wanted(workers=options.write.workers))
    if MASTER not in model.roles:
        why = f": {model.unread}" if model.unread else ""
        raise UsageError(
            f"{opened.location.path} holds no fp32 masters that weights could be repaired from{why}"
        )
    found = find_damage(opened.files, model, options.write.threads)
    if not found:
        return _nothing(source, output, opened)
    if not options.trust_masters:
        refuse_unproven(list(found.values()))
    conversion = write_torch_dist(mended(model, list(found)), opened, TorchDistOptions(), 1)
    written = _write(source, output, opened, conversion, options, progress)
    return Repaired(
        source,
        output,
        "torch_dist",
        tuple(_changes(list(found.values()))),
        len(conversion.target.tensors),
        len(conversion.target.objects),
        written,
        opened.location.left_out,
    )


def _write(
    source: str,
    output: str,
    opened: Opened,
    conversion: Conversion,
    options: RepairOptions,
    progress: Callable[[int, int], None] | None,
) -> WriteReport | None:
    place = choose_output(source, opened.location, output, options.overwrite, options.resume)
    place = replace(place, extra_files=conversion.extra_files)
    plan = conversion.plan
    assert plan is not None  # `write_torch_dist` lays out what it writes
    with shared_out(plan.bytes_to_write, options.write, Ranks(), place.directory) as (ranks, write):
        rehearse(plan, opened.files, place, write, ranks)
        if options.dry_run:
            return None
        return write_checkpoint(plan, opened.files, place, write, ranks=ranks, progress=progress)


def _changes(damaged: list[Damage]) -> list[Change]:
    by_cause: dict[str, list[Damage]] = {}
    for one in damaged:
        by_cause.setdefault(one.cause, []).append(one)
    return [
        Change(f"weights-{cause}", tuple(d.name for d in found), _PROOFS.get(cause, _BY_WORD), found[0].issue)
        for cause, found in by_cause.items()
    ]


def _nothing(source: str, output: str, opened: Opened) -> Repaired:
    """Of a sound checkpoint, as far as is known: it is left where it is."""
    return Repaired(source, output, opened.location.kind, (), 0, 0, None, opened.location.left_out)
