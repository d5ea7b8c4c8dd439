"""A checkpoint of either format whose `fsdp_dtensor` form is decided, before anyone says who holds its pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckpt_tools.commands.outputs import object_archives
from ckpt_tools.commands.placements import Layout, Model, target_model
from ckpt_tools.commands.relayout import open_fsdp
from ckpt_tools.commands.target_job import TargetJob
from ckpt_tools.commands.to_fsdp_dtensor import ConvertOptions, build_target, open_source
from ckpt_tools.formats.detect import Location, locate
from ckpt_tools.formats.files import Files
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.target import Target
from ckpt_tools.model.without_gc import without_gc


@dataclass(frozen=True, slots=True)
class Prepared:
    """Close its files when done, or use it in a `with`."""

    location: Location
    files: Files
    catalog: Catalog  # the source's, with tensors added that stand inside its objects
    target: Target
    model: Callable[[], Model]
    archives: Callable[[], Iterable[tuple[str, bytes]]]  # of the target's objects
    job: TargetJob
    fp8_recipe: str | None = None  # of a source with weights held in FP8 (`ModelSettings.fp8_recipe`)

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()


@without_gc()
def prepare(source: str, layout: Layout, options: ConvertOptions) -> Prepared:
    """The checkpoint at `source` as the `fsdp_dtensor` checkpoint that a job of `layout` loads.

    Raises the errors of `convert_to_fsdp_dtensor` up to its plan.
    """
    location = locate(source, options.iteration)
    if location.kind == "fsdp_dtensor":
        opened = open_fsdp(location, options, layout)
        return Prepared(
            location,
            opened.files,
            opened.catalog,
            opened.built.target,
            opened.model,
            opened.archives,
            opened.job,
        )
    files, model = open_source(
        location, options.ignore_keys, options.trust_pickle, options.target.weights_only
    )
    try:
        built, job = build_target(model, layout, options.target)
    except BaseException:
        files.close()
        raise
    return Prepared(
        location,
        files,
        model.catalog,
        built.target,
        lambda: target_model(built),
        lambda: object_archives(built.target.objects),
        job,
        model.settings.fp8_recipe,
    )
