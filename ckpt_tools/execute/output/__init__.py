"""The output's folder or store: locked, resumed, published.

* `access`: who may read and write an output
* `folders`: directories held open
* `journal`: what is finished, for `--resume`
* `finished`: whether an output that is there is what would be written
* `local_output`: an output in a directory
* `remote_output`: an output in an object store: who has it, and what is uploaded
* `opened_shards`: safetensors files, opened as everybody will open them
* `fileio`: exact reads and writes of local files
* `staging`: a folder that can be taken, and appears whole or not at all
"""
