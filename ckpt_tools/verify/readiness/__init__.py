"""Will a job start from it.

* `job`: the settings of a job that is about to start
* `megatron_args`: Megatron-LM's command line, read as its own parser does
* `facts`: what rules look at, and what a rule is
* `job_rules`: what the job's own settings must be
* `load_rules`: whether the checkpoint fits the job
"""
