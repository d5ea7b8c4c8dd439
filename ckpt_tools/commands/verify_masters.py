"""`verify --content`: does every fp32 master round to its stored weight, and what is known of damage where not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt_tools.commands.export_source import master_targets
from ckpt_tools.commands.mend_weights import judge_damage
from ckpt_tools.errors import CkptError, StorageError
from ckpt_tools.execute.check_masters import compare_all_masters
from ckpt_tools.formats.files import Files
from ckpt_tools.model.model import Model
from ckpt_tools.verify.report import Check, Findings


def check_all_masters(files: Files, read: Callable[[], Model], threads: int, workers: int | None) -> Check:
    """Every master of the model that `read` gives, compared with its weight.

    Raises:
        StorageError: something cannot be read. Other errors are findings.
    """
    found = Findings("masters", "elements")
    try:
        model = read()
        targets, recipe = master_targets(model), model.settings.fp8_recipe
        report, problems = compare_all_masters(files, model.catalog, targets, threads, workers, recipe)
    except StorageError:
        raise
    except CkptError as error:
        found.error("optimizer", str(error))
        return found.done()
    found.looked_at = report.elements
    if report.fp8_by_position:
        found.warning(
            "optimizer",
            f"the weights of {report.fp8_by_position} masters are held in FP8, and no one scale explains every "
            "element: proven by position only",
        )
    known = _known_damage(files, model, threads, problems) if problems else {}
    for problem in problems:
        element, _, values = problem.partition(": ")
        cause = known.get(element.partition("[")[0], "")
        found.error(element, f"{values}: the master does not round to the weight{cause}")
    return found.done()


def _known_damage(files: Files, model: Model, threads: int, problems: Sequence[str]) -> dict[str, str]:
    """By the name of a weight that its master does not round to: what is known of such damage, and the way out."""
    try:
        damaged = judge_damage(files, model, threads, problems).values()
    except CkptError:
        return {}  # masters that are no better: their own checks say so
    return {
        d.name: f" ({d.issue or 'damaged after it was written'}: "
        + ("`repair` takes it from the master)" if d.is_proven else f"{d.what.partition(': ')[2]})")
        for d in damaged
        if d.issue or d.is_proven
    }
