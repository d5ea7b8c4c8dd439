"""Structure and meaning, without reading values.

* `structure`: chunks, files, frames: whole, without reading values
* `meaning`: layers, experts, states, groups: a whole model
* `plain_states`: the optimizers of a plain state dict
* `place`: folder, tracker and what lies beside
* `hf_folder`: whether a Hugging Face folder is a model, the one of its config.json
* `settings_fit`: whether stored settings describe the tensors beside them
* `counters`: whether iteration, samples and steps are of one moment
* `model_rules`: whether the model has the tensors that are stored
"""
