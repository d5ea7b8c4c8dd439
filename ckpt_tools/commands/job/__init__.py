"""A job that writes: open, prepare, place, write, report.

* `conversion`: one conversion: planned, rehearsed, proven, carried out
* `report`: what a conversion says of itself
* `outputs`: where a result goes, and what is reported of it
* `placements`: which rank writes which box, and the job that will load an output
* `iterations`: `--iteration all`
* `opened`: a checkpoint opened for reading
* `read_model`: READ: the model in an opened checkpoint
* `rewrite`: what the editing commands share
"""
