"""`convert`, `plan`, `build-param-group-map`.

* `to_fsdp_dtensor`: `convert` to Megatron-FSDP; `build-param-group-map`
* `to_torch_dist`: `convert` back to 3D parallel
* `to_dcp`: `convert` to a plain PyTorch state dict
* `relayout`: `convert` of what has its keys already
* `plan`: `plan`
* `picture`: its pictures
* `fresh_optimizer`: `--fresh-optimizer` of all commands, and `strip --fresh-optimizer`
* `version_2`: the names of Megatron-FSDP v2
"""
