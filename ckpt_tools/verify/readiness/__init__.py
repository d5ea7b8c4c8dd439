"""Will a job start from it.

* `job`: the settings of a job that is about to start
* `job_settings`: settings of the kind that Megatron takes
* `megatron_args`: Megatron-LM's command line, read as its own parser does
* `facts`: what rules look at, and what a rule is
* `job_rules`: what Megatron refuses of settings alone
* `load_rules`: whether the checkpoint fits the job
* `parallel_rules`: whether parallel sizes divide what they share
"""
