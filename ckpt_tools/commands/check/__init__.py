"""`verify`, `diff`, `preflight`.

* `verify`: `verify`
* `verify_metadata`: its checks that look at no values
* `verify_masters`: do masters round to weights, and what is known where not
* `diff`: `diff`
* `spelling`: of a state dict and the same one in a wrapper
* `diff_hf`: `diff` of a Hugging Face model and a Megatron checkpoint
* `preflight`: `preflight`
* `launch`: the launch command that it prints
"""
