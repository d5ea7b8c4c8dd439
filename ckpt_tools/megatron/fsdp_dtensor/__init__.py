"""`fsdp_dtensor`: from a `Model` to its keys, and back.

* `options`: what a user may decide about an `fsdp_dtensor` output
* `write`: to what the checkpoint must contain, from a `Model` or for another topology: all decisions
* `parameters`: parameters of the running model as rows of stored ones, and back; which are written in halves
* `fresh_optimizer`: zero moments and step 0, for weights that start a job
* `tensors`: the keys, and what is stored under them; nested values as leaves
* `read`: the keys taken apart again; the checkpoint as a `Model`
"""
