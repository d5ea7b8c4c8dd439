"""`verify --content`: does every fp32 master round to its stored weight, and what is known of damage where not."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.read_model import Wanted, master_targets, read_model
from ckpt_tools.errors import NEVER_FINDINGS, CkptError
from ckpt_tools.execute.proof.masters import compare_all_masters
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.megatron.dcp.state_dict import read_state_dict
from ckpt_tools.megatron.run_state.common_state import read_common_state
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.model import Model
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.verify.report import Check, Findings


def masters_check(
    location: Location,
    files: Files,
    catalog: Catalog,
    trust_pickle: bool,
    threads: int,
    workers: int | None,
    model_workers: int | None,
) -> Callable[[Set[tuple[Item, Item]]], list[Check]]:
    """Read the model of a `torch_dist` checkpoint or of a plain state dict; what compares masters with weights.

    That is given what the scan has found (`verify.content.Scanned.rounded`), and gives nothing where there cannot be
    any masters.

    Raises (both):
        StorageError: something cannot be read. Other errors are findings.
    """
    is_plain = location.kind == "dcp"
    if is_plain and not any(one.masters for one in read_state_dict(catalog).optimizers):
        return lambda _: []
    wanted = Wanted("masters") if is_plain else Wanted(unknown_keys=True, workers=model_workers)
    try:
        common = read_common_state(files, catalog, trust_pickle)
        model = read_model(Opened(location, files, catalog, common, trust_pickle), wanted)
        targets = master_targets(model)
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        failed = _failed(error)
        return lambda _: [failed]
    return lambda rounded: [_compared(files, model, targets, threads, workers, rounded)]


def _failed(error: CkptError) -> Check:
    found = Findings("masters", "elements")
    found.error("optimizer", str(error))
    return found.done()


def _compared(
    files: Files,
    model: Model,
    targets: Sequence[TargetTensor],
    threads: int,
    workers: int | None,
    rounded: Set[tuple[Item, Item]],
) -> Check:
    recipe = model.settings.fp8_recipe
    try:
        report, problems = compare_all_masters(
            files, model.catalog, targets, threads, workers, recipe, rounded
        )
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        return _failed(error)
    found = Findings("masters", "elements")
    found.looked_at = report.elements
    for problem in problems:
        element, _, values = problem.partition(": ")
        found.error(element, f"{values}: the master does not round to the weight")
    return found.done()
