"""`convert`, `plan`, `build-param-group-map`.

* `options`: what a user may decide about a conversion to Megatron-FSDP or DCP
* `to_fsdp_dtensor`: `convert` to Megatron-FSDP
* `to_torch_dist`: `convert` back to 3D parallel
* `to_dcp`: `convert` to a plain PyTorch state dict
* `relayout`: `convert` of what has its keys already
* `plan`: `plan`
* `picture`: its pictures
* `group_map`: `build-param-group-map`
* `fresh_optimizer`: `--fresh-optimizer` of all commands, and `strip --fresh-optimizer`
* `version_2`: the names of Megatron-FSDP v2
"""
