"""Structure and meaning, without reading values.

* `structure`: chunks, files, frames: whole, without reading values
* `meaning`: layers, experts, states, groups: a whole model; the optimizers of a plain state dict
* `place`: folder, tracker and what lies next to them
* `hf_folder`: whether a Hugging Face folder is a model, the one of its config.json
* `counters`: whether iteration, samples and steps are of one moment
"""
