"""The output's folder or store: locked, resumed, published.

* `access`: who may read and write an output
* `folders`: directories held open
* `journal`: what is finished, for `--resume`
* `checks`: what it replaces, whether it is what would be written, whether safetensors opens it
* `local_output`: an output in a directory, which appears whole or not at all
* `remote_output`: an output in an object store: who has it, and what is uploaded
* `trackers`: whether a run's tracker moves to what was written
* `fileio`: exact reads and writes of local files
"""
