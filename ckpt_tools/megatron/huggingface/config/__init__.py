"""Config.json and Megatron's arguments, read and written.

* `config`: `config.json`, read and written
* `config_fields`: what a field of config.json is
* `field_values`: values that config.json and `ModelArgs` say differently
* `layer_values`: what config.json says of each layer
* `moe_values`: experts, how they are chosen, and the indexer of sparse attention
* `hybrid_values`: which layers are attention, gated delta nets or Mamba
* `model_args`: a model's architecture in one spelling
* `read_args`: as Megatron-LM and Megatron-Bridge stored it
* `written_args`: and back, as args of a new checkpoint
* `numbers`: sizes from settings, looked at before anything is built of them
* `rope_args`: rotary embeddings
* `recurrent_args`: gated delta nets and Mamba, and which layers they are
* `sparse_attention`: an indexer of keys in Megatron's args
* `layer_patterns`: which layers have a window, or experts
* `ledger`: every other setting of either side, and what becomes of it (arguments.yaml, config_json.yaml)
"""
