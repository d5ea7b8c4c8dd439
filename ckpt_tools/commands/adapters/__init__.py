"""`merge-adapter`, `export-hf --peft`.

* `merge_adapter`: `merge-adapter`
* `adapter_source`: a Megatron checkpoint that holds a low-rank adapter
* `peft_source`: a PEFT directory, merged into a Hugging Face model's tensors
* `export_peft`: `export-hf --peft`
"""
