"""Pickles, read without running anything.

* `machine`: whether a pickle is safe, which globals it may name, and what `.metadata` says
* `unpickle`: objects from untrusted pickles, with stand-ins for what is not plain data
* `stored_classes`: the classes that `.metadata` may be made of
* `packed_records`: the flat records that make up most of it, recognised whole
"""
