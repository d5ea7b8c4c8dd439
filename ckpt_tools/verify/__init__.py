"""Proves it: files to reports. What `verify`, `diff` and `preflight` find.

* `report`: checks and findings, as plain data
* `structure`: chunks, files, frames: whole, without reading values
* `meaning`: layers, experts, states, groups: a whole model
* `plain_states`: the optimizers of a plain state dict
* `packing`: for which job packed projections are
* `place`: folder, tracker and what lies beside
* `integrity`: Megatron's own `integrity.json`
* `hf_folder`: whether a Hugging Face folder is a model
* `hf_names`: whether its tensors are those of config.json's model
* `manifest`: SHA-256 sums of files and tensors
* `content`: one pass over every byte
* `scan`: the same of one stored item
* `master_pairs`: masters that one pass can compare with their weights
* `values`: what is not a number; sums and extremes
* `parts`: long tensors cut for many threads
* `measure`: sums of every tensor, by threads and processes
* `meter`: bytes read so far
* `compare`: are two arrays the same
* `diff_values`: what differs between two objects
* `stored_weights`: weights behind the masters that are compared
* `differences`: are two checkpoints the same
* `job`: the settings of a job that is about to start
* `job_settings`: settings of the kind that Megatron takes
* `megatron_args`: Megatron-LM's command line, read as its own parser does
* `facts`: what rules look at, and what a rule is
* `job_rules`: what Megatron refuses of settings alone
* `load_rules`: whether the checkpoint fits the job
* `parallel_rules`: whether parallel sizes divide what they share
* `settings_fit`: whether stored settings describe the tensors beside them
* `counters`: whether iteration, samples and steps are of one moment
* `model_rules`: whether the model has the tensors that are stored
"""
