"""`modify-state-dict`, `slice`, `strip`, `average`, `merge-adapter`, `repair`, `copy`.

* `modify`: `modify-state-dict`
* `slice`: `slice`
* `strip`: `strip`
* `average`: `average`
* `merge_adapter`: `merge-adapter`, and how a Megatron checkpoint with a low-rank adapter is read
* `repair`: `repair`
* `copy`: `copy`
"""
