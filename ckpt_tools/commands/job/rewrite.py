"""What the editing commands share: a conversion in which tensors keep their chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ckpt_tools.commands.job.conversion import (
    Conversion,
    EditOptions,
    Progress,
    Writer,
    convert,
    like_to_like,
    open_source,
)
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.placements import stored_chunks
from ckpt_tools.commands.job.report import ConversionReport, Edits, MastersUse
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.locate.detect import COMPANIONS, Location
from ckpt_tools.formats.storage.files import AnyPath
from ckpt_tools.formats.torch_archive.item_reader import read_small_file
from ckpt_tools.megatron.keys import is_optimizer_key
from ckpt_tools.megatron.torch_dist.grids import incomplete_objects, refuse_incomplete
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.plan.build import build_plan


def edit(
    source: AnyPath,
    output: AnyPath,
    plan: Callable[[Opened], Conversion],
    options: EditOptions,
    progress: Progress | None,
    *,
    opened: Opened | None = None,
    place: Callable[[str, Location, str, EditOptions], Output] = like_to_like,
    ranks: Ranks | None = None,
) -> ConversionReport:
    """Carry out what `plan` makes of the checkpoint at `source`, or of `opened`, which its caller closes."""

    def opening(source: str, options: EditOptions) -> AbstractContextManager[Opened]:
        return open_source(source, options) if opened is None else nullcontext(opened)

    writer = Writer(opening, place, lambda opened, _options, _world: plan(opened))
    return convert(source, output, writer, options, progress, options.dry_run, ranks)


def rewrite(
    opened: Opened,
    target: Target,
    archives: Iterable[tuple[str, bytes]],
    edits: Edits,
    *,
    catalog: Catalog | None = None,
    companions: Mapping[str, bytes] | None = None,
    original_shapes: Mapping[str, tuple[int, ...]] | None = None,
    chunks_of: Callable[[TargetTensor], str | None] | None = None,
    **more: Any,
) -> Conversion:
    """`target` in the format of its source, a file for each of the source's.

    Args:
        archives: of the target's objects.
        catalog: the source's with tensors added that stand inside its objects, or in other files.
        companions: what replaces the source's small files of the same name.
        chunks_of: the stored tensor that gives a tensor its chunks and files. Default: the one that it shows whole.
        more: other fields of the conversion.
    """
    refuse_missing_shards(opened, (one.key for one in target.objects))
    stored = catalog or opened.catalog
    place, files = stored_chunks(opened.catalog if chunks_of else stored, chunks_of or _shown)
    kind = opened.location.kind
    own = {name: read_small_file(opened.files, name) for name in COMPANIONS if opened.files.exists(name)}
    return Conversion(
        to="hf" if kind == "safetensors" else kind,
        loader=None,
        iteration=opened.location.iteration,
        catalog=stored,
        target=target,
        plan=build_plan(stored, target, place, files, archives, original_shapes),
        extra_files=own | dict(companions or {}),
        edits=edits,
        **more,
    )


def refuse_missing_shards(opened: Opened, keys: Iterable[str]) -> None:
    """Raise MappingError if shards are missing of objects with these keys, which would go into an output."""
    refuse_incomplete(
        incomplete_objects(keys, opened.common),
        f"`modify-state-dict {opened.location.path} OUT` with ",
        "--op 'remove ^{}/'",
    )


def _shown(tensor: TargetTensor) -> str | None:
    source = tensor.sources[0]
    return None if len(tensor.sources) > 1 or source.view else source.key


def use_of_masters(opened: Opened, otherwise: MastersUse) -> MastersUse:
    """What becomes of masters: `otherwise` unless its format keeps them in the place of weights."""
    catalog = opened.catalog
    if not any(map(is_optimizer_key, (*catalog.tensors, *catalog.objects))):
        return "none"
    return "as_stored" if opened.format.masters_in_place else otherwise
