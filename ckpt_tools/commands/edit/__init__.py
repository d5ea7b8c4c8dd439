"""`modify-state-dict`, `slice`, `strip`, `average`, `repair`, `copy`.

* `modify`: `modify-state-dict`
* `slice`: `slice`
* `strip`: `strip`
* `average`: `average`
* `mean_targets`: of which stored tensors each tensor of a mean is made
* `repair`: `repair`
* `mend_keys`: what it does to keys of `fsdp_dtensor`
* `copy`: `copy`
"""
