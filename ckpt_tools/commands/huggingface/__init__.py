"""`export-hf`, `import-hf`.

* `import_hf`: `import-hf`, also with a PEFT adapter
* `export_hf`: `export-hf`, also of an adapter, and of a plain state dict with Hugging Face names
* `export_source`: what an export reads, of a model of several parts too, and what a user may decide about it
* `folder`: the files of a Hugging Face directory: config.json, tokenizer, weight files and their index; and tensors
  of such a model: those without content, with other axes, shared, or with an offset
"""
