"""`export-hf`, `import-hf`.

* `import_hf`: `import-hf`
* `export_hf`: `export-hf`
* `export_options`: what a user may decide about an export
* `export_source`: what an export reads
* `plain_to_hf`: of a plain state dict with Hugging Face names
* `hf_directory`: weight files and what stands beside them
* `hf_parts`: what exports and imports share
* `hf_assets`: tokenizers and the like, which go along with a model
* `several_parts`: a checkpoint of such a model, whole or its language model alone
* `tower_source`: a vision-language model's directory, of which the language model is converted
"""
