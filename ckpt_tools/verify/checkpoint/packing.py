"""For which job an `fsdp_dtensor` checkpoint is: what tells it agrees, and its packed projections can be for it."""

from __future__ import annotations

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.fsdp_dtensor.parameters import packed_projections
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.record import RECORD_FILE, read_record, stored_tp
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.verify.report import Check, Findings


def check_packing(files: Files, catalog: Catalog, common: CommonState) -> Check:
    """Whether the record, the rng states and the rows of packed projections are those of one job."""
    found = Findings("packing", "packed projections")
    stored = FORMATS["fsdp_dtensor"]
    shapes = stored.weights(catalog).shapes
    rows = {name: shape[0] if shape else 1 for name, shape in shapes.items()}
    packed = packed_projections(rows)
    found.looked_at = len(packed)
    try:
        tp = stored_tp(read_record(files), stored.rng_ranks(catalog), common.args)
    except CkptError as error:
        found.error(RECORD_FILE, str(error))
        return found.done()
    if tp is None:
        for name in packed[:1]:
            found.warning(
                name,
                "nothing tells for which tensor parallel size its rows are; for any other they mean other values",
            )
        return found.done()
    for name in packed:
        if rows[name] % tp.ranks:
            found.error(
                name,
                f"its {rows[name]} rows are not those of {tp.ranks} tensor-parallel ranks (by {tp.source})",
            )
    return found.done()
