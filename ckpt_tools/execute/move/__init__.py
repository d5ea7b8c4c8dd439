"""Bytes from source to output in bounded memory.

* `stream`: the pump: one item at a time, or many small ones, through buffers of fixed size
* `source_reader`: regions of stored tensors: read, cast or computed
* `read_box`: any box of a tensor, for checks and printing
"""
