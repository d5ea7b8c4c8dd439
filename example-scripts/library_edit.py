"""Cut the first layer out as a small checkpoint, drop its optimizer, and look at a tensor and an object of it.

What an upstream program damaged is repaired where the checkpoint proves what is right.

python example-scripts/library_edit.py tests/data/core019_llama_tp2_fully_reshardable out/small out/weights
"""

import sys

from ckpt_tools import (
    CkptError,
    EditOptions,
    RepairOptions,
    modify_state_dict,
    open_checkpoint,
    print_tensor,
    repair_checkpoint,
    slice_layers,
)

source, small, weights = sys.argv[1:]
try:
    repaired = repair_checkpoint(source, f"{small}-repaired", RepairOptions(dry_run=True))
    print(*(f"{change.cause}: {change.proof}" for change in repaired.changes), sep="\n")
except CkptError as error:  # also where there is nothing to repair
    print(error)
cut = slice_layers(source, small, "0:1", options=EditOptions(overwrite=True))
print(f"{cut.tensors} tensors of one layer")
left = modify_state_dict(small, weights, [r"remove optimizer\..*"], EditOptions(overwrite=True))
print(f"{left.tensors} tensors without the {len(left.removed)} entries of the optimizer")

norm = print_tensor(weights, "decoder.final_layernorm.weight", part="0:4", stats=True)
print(norm.dtype, norm.shape, norm.values, norm.statistics["max"])
with open_checkpoint(weights) as opened:  # the catalog behind all of it: keys, boxes, files, byte ranges
    for chunk in opened.catalog.tensors["output_layer.weight"].chunks:
        print(chunk.box, chunk.item.file, chunk.item.offset, chunk.item.length)
