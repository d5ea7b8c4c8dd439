"""What the editing commands share: a target whose tensors keep the chunks of their source, written and published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.outputs import choose_output
from ckpt_tools.commands.job.report import Masters, MastersUse
from ckpt_tools.errors import UnsupportedCheckpointError
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.processes.team import with_workers
from ckpt_tools.execute.run import WriteOptions, WriteReport, write_checkpoint
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import read_small_file
from ckpt_tools.megatron.keys import is_optimizer_key
from ckpt_tools.megatron.run_state.record import RECORD_FILE
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.plan.build import Placement, build_plan

COMPANIONS = ("metadata.json", "common.pt", "run_config.yaml", "train_state.pt", RECORD_FILE)


@dataclass(frozen=True, slots=True)
class EditOptions:
    """How an edited copy is made."""

    iteration: int | None = None
    trust_pickle: bool = False
    overwrite: bool = False
    write: WriteOptions = field(default_factory=WriteOptions)
    resume: bool = False
    tracker: bool = True  # that of the output's root names it then


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """What a command did that writes a checkpoint in the format of its source."""

    source: str
    output: str
    source_format: str  # `Location.kind`
    tensors: int
    objects: int
    removed: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    masters: Masters | None = None  # what became of them; None: as any other tensor, unlooked at
    written: WriteReport
    left_out: tuple[str, ...] = ()  # a line for each thing beside the source's tensors that stays behind

    def as_json(self) -> dict[str, object]:
        """What all of these commands say to programs."""
        masters = {} if self.masters is None else {"masters": self.masters.as_json()}
        return {
            "output": self.output,
            "source_format": self.source_format,
            "tensor_count": self.tensors,
            "object_count": self.objects,
            **masters,
            "left_out": self.left_out,
            **self.written.in_short(),
        }


def use_of_masters(opened: Opened, otherwise: MastersUse) -> MastersUse:
    """What becomes of masters: those of `fsdp_dtensor` stand in the place of weights, of others it is `otherwise`."""
    catalog = opened.catalog
    if not any(map(is_optimizer_key, (*catalog.tensors, *catalog.objects))):
        return "none"
    return "as_stored" if opened.location.kind == "fsdp_dtensor" else otherwise


def rewrite(
    source: str,
    opened: Opened,
    output: str,
    target: Target,
    blobs: Iterable[tuple[str, bytes]],
    options: EditOptions,
    *,
    catalog: Catalog | None = None,
    companions: Mapping[str, bytes] | None = None,
    original_shapes: Mapping[str, tuple[int, ...]] | None = None,
    placement: tuple[Placement, int] | None = None,
    files: Files | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WriteReport:
    """Write `target` to `output` and publish it.

    `blobs` are the archives of the target's objects; `companions` replace the small files of the source of the same
    name; `catalog` is the source's with tensors added that stand inside its objects, or that `files` hold besides.
    `placement` and its number of files are those of `keep_chunks` unless given.
    """
    place = choose_output(source, opened.location, output, options.overwrite, options.resume, options.tracker)
    where, world = placement or keep_chunks(catalog or opened.catalog)
    plan = build_plan(catalog or opened.catalog, target, where, world, blobs, original_shapes)
    own = opened.files
    kept = {name: read_small_file(own, name) for name in COMPANIONS if own.exists(name)}
    place = replace(place, extra_files=kept | dict(companions or {}))
    with with_workers(plan.bytes_to_write, options.write, Ranks(), place.directory) as (ranks, write):
        return write_checkpoint(plan, files or own, place, write, ranks=ranks, progress=progress)


def keep_chunks(catalog: Catalog) -> tuple[Placement, int]:
    """A placement of one file for each of the source's, whose tensors keep their chunks; and the number of files.

    A tensor that is seen through a view, or made of several, becomes one chunk in the first file.
    """
    names = {chunk.item.file for entry in catalog.tensors.values() for chunk in entry.chunks}
    rank = {name: i for i, name in enumerate(sorted(names))}

    def place(tensor: TargetTensor) -> Sequence[tuple[int, Box]]:
        source = tensor.sources[0]
        if len(tensor.sources) > 1 or source.view:
            return [(0, full_box(tensor.shape))]
        chunks = catalog.tensors[source.key].chunks
        return [(rank[chunk.item.file], chunk.box) for chunk in chunks] or [(0, full_box(tensor.shape))]

    return place, max(len(rank), 1)


def need_dcp(opened: Opened) -> None:
    """Raise UnsupportedCheckpointError if it is not a torch distributed checkpoint."""
    if opened.location.kind == "safetensors":
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is a Hugging Face model; only torch distributed checkpoints are edited"
        )
