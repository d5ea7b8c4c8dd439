"""`export-hf`, `import-hf`.

* `import_hf`: `import-hf`
* `export_hf`: `export-hf`
* `export_source`: what an export reads, of a model of several parts too, and what a user may decide about it
* `plain_to_hf`: of a plain state dict with Hugging Face names
* `folder`: the files of a Hugging Face directory: config.json, tokenizer, weight files and their index
* `tensors`: the tensors of such a model: those without content, with other axes, shared, or with an offset
"""
