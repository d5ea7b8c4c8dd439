"""Which rank of a training job owns which rows: shapes and a topology in, boxes out. No torch, no files.

* `topology`: the job's ranks, along which axes, and what each axis shards
* `parameters`: parameters as this room sees them
* `units`: FSDP units, the order of parameters, and how TP and EP cut them, from names and shapes
* `placement`: a box per rank and tensor: flat buffers and FSDP2's rule; upstream's oddities in one table
* `memory`: what one rank of the job needs
"""
