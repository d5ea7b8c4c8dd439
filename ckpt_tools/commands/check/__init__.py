"""`verify`, `diff`, `preflight`.

* `verify`: `verify`
* `verify_metadata`: its checks that look at no values
* `verify_masters`: do masters round to weights, and what is known where not
* `diff`: `diff`
* `sides`: two checkpoints under one naming, for `diff` and `stats`
* `preflight`: `preflight`
* `launch`: the launch command that it prints
"""
