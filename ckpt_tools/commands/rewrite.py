"""What the editing commands share: a target whose tensors keep the chunks of their source, written and published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.commands.opened import Opened
from ckpt_tools.commands.outputs import choose_output
from ckpt_tools.errors import UnsupportedCheckpointError
from ckpt_tools.execute.run import WriteOptions, WriteReport, write_checkpoint
from ckpt_tools.formats.container import read_small_file
from ckpt_tools.megatron.record import RECORD_FILE
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


@dataclass(frozen=True, slots=True)
class Edited:
    """What an editing command did."""

    source: str
    output: str
    tensors: int
    objects: int
    removed: tuple[str, ...]
    renamed: Mapping[str, str]
    written: WriteReport
    left_out: tuple[
        str, ...
    ] = ()  # a line for each thing beside the source's tensors that is not carried over


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
    progress: Callable[[int, int], None] | None = None,
) -> WriteReport:
    """Write `target` to `output` and publish it.

    `blobs` are the archives of the target's objects; `companions` replace the small files of the source of the same
    name; `catalog` is the source's with tensors added that stand inside its objects; `placement` says where tensors
    go and into how many files, where they are not to keep their chunks.

    Raises:
        UsageError: the output overlaps the source or is taken.
        MappingError, CorruptCheckpointError, StorageError: as planning and writing say.
    """
    place = choose_output(source, opened.location, output, options.overwrite, options.resume)
    place_of, world = placement or keep_chunks(catalog or opened.catalog)
    plan = build_plan(catalog or opened.catalog, target, place_of, world, blobs, original_shapes)
    files = opened.files
    kept = {name: read_small_file(files, name) for name in COMPANIONS if files.exists(name)}
    place = replace(place, extra_files=kept | dict(companions or {}))
    return write_checkpoint(plan, files, place, options.write, progress=progress)


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
    """
    Raises:
        UnsupportedCheckpointError: the checkpoint is no torch distributed checkpoint.
    """
    if opened.location.kind == "safetensors":
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is a Hugging Face model; only torch distributed checkpoints are edited"
        )
