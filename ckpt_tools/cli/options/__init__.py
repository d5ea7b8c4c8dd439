"""Options as rows, and what was given.

* `row`: what an option is: one row, from its spelling to its default
* `table`: the rows that several commands share
* `given_values`: values as people write them, and places that can be written to
* `signature`: rows to a command, and what was given to the library's options classes
* `job_sizes`: the training job of what was given
"""
