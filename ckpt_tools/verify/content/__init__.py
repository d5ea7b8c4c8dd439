"""One pass over every byte.

* `content`: one pass over every byte
* `scan`: the same of one stored item
* `values`: what is not a number; sums and extremes
* `parts`: long tensors cut for many threads
* `measure`: sums of every tensor, by threads and processes
* `meter`: bytes read so far
* `master_pairs`: masters that one pass can compare with their weights
* `manifest`: SHA-256 sums of files and tensors
* `integrity`: Megatron's own `integrity.json`
"""
