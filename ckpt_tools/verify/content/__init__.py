"""One pass over every byte.

* `content`: one pass over every byte
* `values`: what is not a number; sums and extremes of every tensor
* `manifest`: SHA-256 sums of files and tensors, Megatron's own `integrity.json`
"""
