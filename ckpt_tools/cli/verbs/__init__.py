"""A module a group of verbs: their options, their texts, and `COMMANDS`, which `cli.commands` builds them from.

* `look`: `inspect`, `ls`, `print-tensor`, `print-torch-dcp-in-json`
* `stats`: `stats`
* `plan`: `plan`
* `convert`: `convert`, also under NVIDIA's two names, `build-param-group-map`
* `huggingface`: `export-hf`, `import-hf`
* `check`: `verify`, `preflight`
* `diff`: `diff`, `compare-two-checkpoint`
* `edit`: `modify-state-dict`, `slice`, `strip`, `average`, `repair`, `copy`, `merge-adapter`
"""
