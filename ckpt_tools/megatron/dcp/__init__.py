"""Any state dict that PyTorch's own `torch.distributed.checkpoint` saved: no format of Megatron, one of everybody's.

* `state_dict`: which keys are weights, which optimizer states; which keys of two dicts are the same
* `read`: the checkpoint of a Megatron model as a `Model`; names of parameters that an optimizer numbers
* `write`: from a `Model` to a plain state dict
"""
