"""`merge-adapter`, `export-hf --peft`.

* `merge_adapter`: `merge-adapter`
* `adapter_source`: a Megatron checkpoint that holds a low-rank adapter
* `peft`: PEFT directories: merged into a Hugging Face model's tensors, and written (`export-hf --peft`)
"""
