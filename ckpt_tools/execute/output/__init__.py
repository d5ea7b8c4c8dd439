"""The output's folder or store: locked, resumed, published.

* `access`: who may read and write an output
* `folders`: directories held open
* `vacant`: whether a local output can be taken
* `publish`: an output folder that appears whole or not at all
* `journal`: what is finished, for `--resume`
* `finished`: whether an output that is there is what would be written
* `marker`: who has a folder of a store
* `local_output`: an output in a directory
* `remote_output`: an output in an object store
* `uploads`: the same into a store, whole files and stretches of long ones
* `opened_shards`: safetensors files, opened as everybody will open them
* `fileio`: exact reads and writes of local files
"""
