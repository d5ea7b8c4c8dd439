"""The ground floor: plain data that every room speaks of.

* `kernels/`: values that are computed from stored tensors, tile by tile
* `box`: regions of a tensor: start and size per dimension
* `choices`: the closed alphabets that a user chooses from, for library and command line
* `dtypes`: element types by name, and their sizes
* `catalog`: what a checkpoint holds: tensors, their chunks, objects
* `views`: how a tensor is seen in the coordinates of another: index arithmetic, moved as bytes
* `roles`: what a value of a parameter is: the weight, its master, a state
* `model`: `Model`, `Parameter`: what a checkpoint says, free of its format
* `target`: what an output must contain, before anyone says who holds which rows
* `transfers`: the plan: every byte's way from a source to the files of an output
* `many`: the decorator of dataclasses that are made by the hundred thousand
* `without_gc`: the garbage collector, left alone while millions of small objects are made
"""
