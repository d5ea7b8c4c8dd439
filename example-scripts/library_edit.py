"""Cut the first layer out as a small checkpoint, drop its optimizer, and look at a tensor and an object of it.

python example-scripts/library_edit.py tests/data/core019_llama_tp2_fully_reshardable out/small out/weights
"""

import sys

import ckpt_tools
from ckpt_tools import EditOptions, modify_state_dict, print_tensor, slice_layers

if len(sys.argv) < 4:
    sys.exit(__doc__)

source, small, weights = sys.argv[1:]
cut = slice_layers(source, small, "0:1", options=EditOptions(overwrite=True))
print(f"{cut.tensors} tensors of one layer")
left = modify_state_dict(small, weights, [r"remove optimizer\..*"], EditOptions(overwrite=True))
print(f"{left.tensors} tensors without the {len(left.edits.removed)} entries of the optimizer")

norm = print_tensor(weights, "decoder.final_layernorm.weight", part="0:4", stats=True)
print(norm.dtype, norm.shape, norm.values, norm.statistics["max"])
with ckpt_tools.open(weights) as opened:  # nothing is read until it is indexed
    print(
        opened["decoder.final_layernorm.weight"][:4], opened.parameters["output_layer.weight"].weight[0, ::8]
    )
    for chunk in opened.catalog.tensors["output_layer.weight"].chunks:
        print(chunk.box, chunk.item.file, chunk.item.offset, chunk.item.length)
