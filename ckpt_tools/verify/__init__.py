"""Proves it: files to reports. What `verify`, `diff` and `preflight` find.

* `content/`: one pass over every byte
* `checkpoint/`: structure and meaning, without reading values
* `compare/`: two checkpoints, tensor by tensor
* `readiness/`: will a job start from it
* `report`: checks and findings, as plain data
"""
