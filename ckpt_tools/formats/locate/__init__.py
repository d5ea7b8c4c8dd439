"""Which folder holds the checkpoint, and of which kind it is.

* `detect`: which checkpoint a path means, and of which kind
* `ignored_files`: what programs keep beside the tensors that is not read
* `hub_cache`: the cache of the Hugging Face hub
* `run_layouts`: how programs lay out the folders of a run, a row a program
* `owned_files`: which files are part of a checkpoint that this tool writes
"""
