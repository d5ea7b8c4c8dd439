"""Values that are computed from stored tensors, tile by tile.

* `kernel`: what a kernel is; the plain ones: zeros, sums, means, FP8 decoded
* `packed`: kernels for weights of 4 bits
* `quantize`: kernels that write block FP8
* `low_rank`: a kernel that merges a low-rank adapter (LoRA) into a weight
* `casts`: casts between floating types, bit for bit as torch does them
* `fp8_weights`: masters of weights that are held in FP8
"""
