"""A module a group of verbs: their options, their texts, and `COMMANDS`, which `cli.commands` builds them from.

* `look`: `inspect`, `ls`, `print-tensor`, `print-torch-dcp-in-json`, `stats`
* `convert`: `convert`, also under NVIDIA's two names, `plan`, `export-hf`, `import-hf`, `build-param-group-map`
* `check`: `verify`, `preflight`, `diff`, also as `compare-two-checkpoint`
* `edit`: `modify-state-dict`, `slice`, `strip`, `average`, `repair`, `copy`, `merge-adapter`
"""
