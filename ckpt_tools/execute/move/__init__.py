"""Bytes from source to output in bounded memory.

* `stream`: the pump: one item at a time through buffers of fixed size
* `small`: many small items at a time
* `fill`: gathers, casts and computes the elements of a region
* `source_reader`: regions of stored tensors
* `read_box`: any box of a tensor, for checks and printing
* `buffers`: what one thread may hold in memory
"""
