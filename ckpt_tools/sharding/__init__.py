"""Which rank of a training job owns which rows: shapes and a topology in, boxes out. No torch, no files.

* `topology`: the job's ranks, along which axes, and what each axis shards
* `parameters`: parameters as this room sees them
* `describe`: names and shapes of live tensors as parameters
* `units`: FSDP units, and the order of parameters
* `buffer_layout`: Megatron-FSDP's flat buffers: which parameters share one, and where they lie
* `placement`: a box per rank and tensor; upstream's oddities in one table
* `fsdp2`: PyTorch FSDP2's rule
* `memory`: what one rank of the job needs
"""
