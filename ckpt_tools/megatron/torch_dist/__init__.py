"""`torch_dist`: from keys to a `Model`, and back.

* `read`: the checkpoint taken apart, as a `Model`
* `stacking`: stored tensors as parameters of one layer and one expert, and parameters as stored tensors
* `optimizer_layouts/`: where the states of a weight lie, layout by layout
* `optimizers`: which states an optimizer keeps; optimizers other than Adam
* `write`: from a `Model` to what the checkpoint must contain
* `grids`: objects of which every rank stores a shard: rng states, Transformer Engine's extra states
"""
