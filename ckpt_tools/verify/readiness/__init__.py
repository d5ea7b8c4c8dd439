"""Will a job start from it.

* `job`: the settings of a job that is about to start; Megatron-LM's command line, read as its own parser does
* `facts`: what rules look at, and what a rule is
* `model_rules`: whether a job's settings, or the stored ones, describe the tensors that are stored
* `rules`: what the job's own settings must be, and whether the checkpoint fits the job
"""
