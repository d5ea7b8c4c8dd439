"""Values that are computed from stored tensors, tile by tile.

* `kernel`: values that are computed from stored tensors, a tile at a time
* `packed`: kernels for weights of 4 bits
* `quantize`: kernels that write block FP8
* `add_number`: a kernel that adds a number: norms that one side stores as weight - 1
* `low_rank`: a kernel that merges a low-rank adapter (LoRA) into a weight
* `casts`: casts between floating types, bit for bit as torch does them
* `fp8_weights`: masters of weights that are held in FP8
"""
