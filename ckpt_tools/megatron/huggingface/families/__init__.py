"""Families of models as data, and which of them a model is of.

* `families`: the families that are known (family_files/), each read when it is asked for
* `family_file`: the family it says, and contradictions in it
* `file_places`: values of a YAML file, and the places that errors name
* `pieces`: what family files share (pieces.yaml)
* `rule_items`: the rules of a family file
* `field_items`: its fields
* `rulefile`: a family that a user adds, and all that a file can say
* `identify`: which family a model is of, and what is refused (refused.yaml)
* `told_by`: what tells it without a config.json
* `look_alikes`: which families it may be of where the one that was told does not fit
* `forms`: the names that family files have for all these
"""
