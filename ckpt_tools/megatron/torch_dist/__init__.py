"""`torch_dist`: from keys to a `Model`, and back.

* `read`: the checkpoint taken apart, as a `Model`
* `slices`: stored keys as parameters of one layer and one expert
* `optimizer_layouts/`: where the states of a weight lie, layout by layout
* `other_optimizers`: what jobs with another optimizer than Adam ask for
* `write`: from a `Model` to what the checkpoint must contain
* `stacking`: which parameters share one stored tensor
* `groups`: the optimizer's part of the common state
* `rng_grid`: rng states, an object for each rank of a grid
* `object_grids`: objects that every rank stored a shard of
* `extra_state`: keys of Transformer Engine's `_extra_state`
"""
