"""Adapters in PEFT directories.

* `peft`: adapters in PEFT directories, the modules they are of, and weights with their parts added
* `peft_targets`: a Megatron adapter as such a directory
"""
