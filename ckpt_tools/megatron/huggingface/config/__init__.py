"""Config.json and Megatron's arguments, read and written.

* `config`: `config.json`, read and written
* `codecs`: a field of config.json, and the values that config.json and `ModelArgs` say differently
* `model_args`: a model's architecture in one spelling, and its sizes looked at before anything is built of them
* `megatron_args`: as Megatron-LM and Megatron-Bridge stored it, and back as args of a new checkpoint
* `rope_args`: rotary embeddings
* `layer_patterns`: which layers have a window, experts, an indexer or are Mamba: the short forms for it
* `ledger`: every other setting of either side, and what becomes of it (arguments.yaml, config_json.yaml)
* `same_model`: whether the settings of two checkpoints describe the same model
"""
