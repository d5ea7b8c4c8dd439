"""Megatron parameters <-> Hugging Face tensors, as rules over views: no model is built, no tensor is held.

* `families/`: families of models as data, and which of them a model is of
* `config/`: config.json and Megatron's arguments, read and written
* `quantization/`: codes and scales: read, and block FP8 written
* `lora/`: adapters in PEFT directories
* `vision/`: vision-language models
* `mapping/`: parameters <-> tensors of the other side
"""
