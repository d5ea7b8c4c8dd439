"""Any state dict that PyTorch's own `torch.distributed.checkpoint` saved: no format of Megatron, one of everybody's.

* `wrappers`: the names of a model without what programs and wrappers put around them
* `one_model`: which keys of two state dicts are the same, where one has its model inside of a wrapper
* `state_dict`: which keys are weights, which optimizer states, and how the latter name their parameters
* `index_names`: which parameter an optimizer means that numbers them
* `adam_fields`: what torch's Adam keeps in a group and Megatron's does not
* `read`: the checkpoint of a Megatron model as a `Model`
* `write`: from a `Model` to a plain state dict
"""
