"""Vision-language models.

* `towers`: the language model inside a vision-language model
* `vision_language`: such models as data (model_files/), and the rules of their other towers
* `tower_targets`: all towers of Megatron-Bridge's, as tensors of either side, and the config.json that a run records
"""
