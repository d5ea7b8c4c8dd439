"""`.metadata` of torch's distributed checkpoints.

* `metadata_read`: `.metadata` of a torch distributed checkpoint as a catalog
* `metadata_write`: `.metadata`, written
* `storage_info`: its part that says where items are stored
* `save_plans`: what every rank wrote, as Megatron keeps it there
"""
