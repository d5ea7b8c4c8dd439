"""Vision-language models.

* `towers`: the language model inside such a model, and all towers of Megatron-Bridge's as tensors of either side
* `vision_language`: such models as data (model_files/), and the rules of their other towers
"""
