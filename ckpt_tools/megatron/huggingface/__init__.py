"""Megatron parameters <-> Hugging Face tensors, as rules over views: no model is built, no tensor is held.

* `layouts`: one parameter <-> its tensors: query groups, gate and up, transposes, interleaved columns
* `rules`: what a rule and a family are; a family's rules written out for the layers and experts of a model
* `file_places`: values of a YAML file, and the places that errors name
* `pieces`: what family files share (pieces.yaml)
* `rule_items`: the rules of a family file
* `field_items`: its fields
* `family_file`: the family it says, and contradictions in it
* `families`: the families that are known (family_files/), each read when it is asked for
* `rulefile`: a family that a user adds, and all that a file can say
* `towers`: the language model inside a vision-language model
* `vision_language`: such models as data (family_files/vision_language), and the rules of their other towers
* `tower_settings`: the config.json that a run records of such a model
* `tower_targets`: all towers of Megatron-Bridge's, as tensors of either side
* `identify`: which family a model is of, and what is refused (refused.yaml)
* `told_by`: what tells it without a config.json
* `look_alikes`: which families it may be of where the one that was told does not fit
* `model_args`: a model's architecture in one spelling
* `read_args`: as Megatron-LM and Megatron-Bridge stored it
* `sparse_attention`: an indexer of keys in Megatron's args
* `written_args`: and back, as args of a new checkpoint
* `numbers`: sizes from settings, looked at before anything is built of them
* `rope_args`: rotary embeddings
* `recurrent_args`: gated delta nets and Mamba, and which layers they are
* `layer_patterns`: which layers have a window, or experts
* `field_values`: values that config.json and `ModelArgs` say differently
* `layer_values`: what config.json says of each layer
* `moe_values`: experts, how they are chosen, and the indexer of sparse attention
* `hybrid_values`: which layers are attention, gated delta nets or Mamba
* `forms`: the names that family files have for all these
* `config_fields`: what a field of config.json is
* `config`: `config.json`, read and written
* `ledger`: every other setting of either side, and what becomes of it (arguments.yaml, config_json.yaml)
* `checks`: what must hold for a model to be exported or imported
* `quantized`: codes and scales seen as the weights they stand for
* `compressed_tensors`: the schemes of that library
* `peft_places`: which modules adapter_config.json says an adapter is of
* `peft`: adapters in PEFT directories, and weights with their parts added
* `peft_targets`: a Megatron adapter as such a directory
* `block_fp8`: an export's linears as codes and scales
* `module_patterns`: which modules config.json leaves as they are
* `model_tensors`: which tensors the model of a config.json has
* `targets`: all tensors of the other side, or every reason why not
* `shard_files`: how the tensors are cut into files
"""
