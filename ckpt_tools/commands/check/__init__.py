"""`verify`, `diff`, `preflight`.

* `verify`: `verify`
* `verify_checks`: its checks: metadata by format, masters against weights
* `diff`: `diff`, and two checkpoints under one naming, for `stats` too
* `preflight`: `preflight`
* `launch`: the launch command that it prints
"""
