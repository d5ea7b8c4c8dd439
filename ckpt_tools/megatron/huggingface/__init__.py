"""Megatron parameters <-> Hugging Face tensors, as rules over views: no model is built, no tensor is held.

layouts.py      one parameter <-> its tensors: query groups, gate and up, transposes, interleaved columns
rules.py        Rule, Family; a family's rules written out for the layers and experts of a model
rule_tables.py  families.py   what this tool knows;  rulefile.py: what a user adds
model_args.py   rope_args.py  layer_patterns.py  config_fields.py  config.py   Megatron's args <-> config.json
ledger.py       arguments.yaml  config_json.yaml   every other setting of either side, and what becomes of it
detect.py       which family a model is
quantized.py  compressed_tensors.py  module_patterns.py   codes and scales seen as the weights they stand for
targets.py      export_targets, import_targets: all tensors of the other side, or every reason why not
shards.py       how the tensors are cut into files
"""
