"""`fsdp_dtensor`: from a `Model` to its keys, and back.

* `options`: what a user may decide about an `fsdp_dtensor` output
* `write`: from a `Model` to what the checkpoint must contain: all decisions
* `parameters`: parameters of the running model as rows of stored ones, and back
* `fresh_optimizer`: an optimizer that has not begun, for weights that start a job
* `gating`: which fc1 weights are written in halves
* `tensors`: the keys, and what stands under them
* `flatten`: nested values as leaves under dotted keys
* `stages`: layers that have the numbers of a pipeline stage
* `read`: the keys taken apart again; the checkpoint as a `Model`
* `regroup`: the same checkpoint for another topology
"""
