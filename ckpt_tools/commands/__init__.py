"""What the verbs do, as library functions; `cli/` asks for them. They share how a checkpoint is opened and laid out.

* `job/`: a job that writes: open, prepare, place, write, report
* `convert/`: `convert`, `plan`, `build-param-group-map`
* `huggingface/`: `export-hf`, `import-hf`
* `edit/`: `modify-state-dict`, `slice`, `strip`, `average`, `merge-adapter`, `repair`, `copy`
* `look/`: `inspect`, `ls`, `stats`, `print-tensor`, and checkpoints as Python objects
* `check/`: `verify`, `diff`, `preflight`
"""
