"""Two checkpoints, tensor by tensor.

* `arrays`: are two arrays the same
* `objects`: what differs between two objects
* `differences`: are two checkpoints the same, the weights behind masters too
"""
