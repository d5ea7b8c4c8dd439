"""Families of models as data, and which of them a model is of.

* `families`: the families that are known (family_files/), a user's, and all that such a file can say
* `family_file`: the family and fields that a file says, and contradictions in it
* `rule_items`: its rules, and what family files share (pieces.yaml)
* `file_places`: values of a YAML file, and the places that errors name
* `identify`: which family a model is of, by config.json or its parameters, and what is refused (refused.yaml)
"""
