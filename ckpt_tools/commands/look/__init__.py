"""`inspect`, `ls`, `stats`, `print-tensor`, and checkpoints as Python objects.

* `inspect`: what a checkpoint is and holds
* `ls`: `ls`
* `stats`: `stats`: the tensors of any checkpoint by parameter, layer and role
* `stats_page`: its pictures: heat maps of layers, histograms
* `pages`: HTML pages, and the one of `inspect`
* `checkpoint`: `ckpt_tools.open`: a checkpoint as an object that is indexed, and `print-tensor`
* `storage_reader`: any checkpoint as what `dcp.load` reads
* `load_dtensors`: a running job's shards, straight from a checkpoint
* `dcp_json`: `print-torch-dcp-in-json`, and Python values as JSON values
"""
