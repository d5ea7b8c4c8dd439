"""Two checkpoints, tensor by tensor.

* `arrays`: are two arrays the same
* `objects`: what differs between two objects
* `differences`: are two checkpoints the same
* `stored_weights`: weights behind the masters that are compared
"""
