"""`modify-state-dict`, `slice`, `strip`, `average`, `repair`, `copy`.

* `modify`: `modify-state-dict`
* `slice`: `slice`
* `strip`: `strip`
* `average`: `average`
* `repair`: `repair`
* `copy`: `copy`
"""
