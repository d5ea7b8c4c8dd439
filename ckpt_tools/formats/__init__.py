"""Bytes in and out: files, archives, pickles, metadata. What the keys mean is for the next room.

* `storage/`: where bytes lie: folders and object stores
* `torch_archive/`: the archives of `torch.save`
* `pickle/`: pickles, read without running anything
* `dcp/`: `.metadata` of torch's distributed checkpoints
* `safetensors`: safetensors files as a catalog
* `locate/`: which folder holds the checkpoint, and of which kind it is
* `untrusted_documents`: JSON and YAML from untrusted sources, bounded
"""
