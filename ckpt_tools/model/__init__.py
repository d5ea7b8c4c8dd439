"""The ground floor: plain data that every room speaks of.

* `kernels`: values that are computed from stored tensors, a tile at a time
"""
