"""One pass over every byte.

* `content`: one pass over every byte
* `scan`: the same of one stored item
* `values`: what is not a number; sums and extremes
* `measure`: sums of every tensor, a long one in parts, by threads and processes
* `manifest`: SHA-256 sums of files and tensors, Megatron's own `integrity.json`
"""
