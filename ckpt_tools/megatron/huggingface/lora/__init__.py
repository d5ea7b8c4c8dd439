"""Adapters in PEFT directories.

* `peft`: adapters in PEFT directories, and weights with their parts added
* `peft_places`: which modules adapter_config.json says an adapter is of
* `peft_targets`: a Megatron adapter as such a directory
"""
