"""Safetensors files as a catalog.

* `catalog`: a Hugging Face folder's tensors as a catalog
* `rank_shards`: that of a folder into which every rank has written its parts
"""
