"""`merge-adapter`, `export-hf --peft`.

* `merge_adapter`: `merge-adapter`, and how a Megatron checkpoint with a low-rank adapter is read
* `peft`: PEFT directories: merged into a Hugging Face model's tensors, and written (`export-hf --peft`)
"""
