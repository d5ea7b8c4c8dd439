"""A module a verb, or a few: its options, its text.

* `average`: `average`
* `convert`: `convert`, also under NVIDIA's two names
* `copy`: `copy`
* `diff`: `diff`, `compare-two-checkpoint`
* `edit`: `modify-state-dict`, `slice`, `print-tensor`
* `group_map`: `build-param-group-map`
* `huggingface`: `export-hf`, `import-hf`
* `inspect`: `inspect`, `print-torch-dcp-in-json`
* `ls`: `ls`
* `merge_adapter`: `merge-adapter`
* `plan`: `plan`
* `repair`: `repair`
* `stats`: `stats`
* `strip`: `strip`
* `verify`: `verify`, `preflight`
"""
