"""The source is proven, and masters against weights.

* `payload_sums`: sums of what is read of a source
* `prove_source`: what is left of that proof, when all work is done
* `check_masters`: masters round to the stored weights
* `rounding`: the same of two arrays
* `fp8_masters`: the same, unit by unit, for weights that may be FP8
* `compare_blocks`: tensors that should be alike, side by side
"""
