"""Pickles, read without running anything.

* `machine`: is a pickle safe, and what `.metadata` says, without loading it
* `values`: what the machine makes of one, and how large that may become
* `allowed_names`: the globals that a pickle may name
* `opcodes`: opcodes of texts and ints, for the two writers
* `unpickle`: objects from strangers, read without importing or running anything
* `stored_classes`: the classes that `.metadata` may be made of
* `packed_records`: the flat records that make up most of it, recognised whole
"""
