"""`verify`, `diff`, `preflight`.

* `verify`: `verify`
* `verify_checks`: its checks: metadata by format, masters against weights
* `diff`: `diff`
* `sides`: two checkpoints under one naming, for `diff` and `stats`
* `preflight`: `preflight`
* `launch`: the launch command that it prints
"""
