"""Parameters <-> tensors of the other side.

* `layouts`: one parameter <-> its tensors: query groups, gate and up, transposes, interleaved columns
* `rules`: what a rule and a family are; a family's rules written out for the layers and experts of a model
* `targets`: which tensors a model has, and all tensors of the other side, or every reason why not
* `checks`: what must hold for a model to be exported or imported
"""
