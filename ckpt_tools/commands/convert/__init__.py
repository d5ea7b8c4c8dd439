"""`convert`, `plan`, `build-param-group-map`.

* `to_dtensors`: `convert` to Megatron-FSDP and to a plain PyTorch state dict; `build-param-group-map`
* `to_torch_dist`: `convert` back to 3D parallel
* `plan`: `plan`
* `picture`: its pictures
* `fresh_optimizer`: `--fresh-optimizer` of all commands, and `strip --fresh-optimizer`
* `version_2`: the names of Megatron-FSDP v2
"""
