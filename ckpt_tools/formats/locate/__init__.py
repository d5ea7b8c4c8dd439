"""Which folder holds the checkpoint, and of which kind it is.

* `detect`: which checkpoint a path means, and of which kind
* `run_layouts`: how programs lay out the folders of a run, a row a program; what they keep next to it
* `owned_files`: which files are part of a checkpoint that this tool writes
"""
