"""`.metadata` of torch's distributed checkpoints.

* `metadata_read`: `.metadata` of a torch distributed checkpoint as a catalog
* `metadata_write`: `.metadata`, written
* `storage_info`: its part that says where items are stored
* `metadata_kind`: that kind, by what `.metadata` names
* `save_plans`: what every rank wrote, as Megatron keeps it there
* `lazy_entries`: entries of it, decoded when they are looked at
"""
