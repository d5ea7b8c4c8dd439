"""What keys mean: from stored keys to a `Model`, and from a `Model` to the keys of an output.

* `run_state/`: what a run saved once for all ranks: arguments, settings, records
* `torch_dist/`: Megatron's own format, read and written, with its optimizer layouts
* `fsdp_dtensor/`: Megatron-FSDP's format, read and written
* `dcp/`: any PyTorch state dict: keys sorted, Megatron models read and written
* `huggingface/`: Hugging Face models: rules, settings, ledgers
* `format`: what differs between formats: which tensors are weights, masters, states
* `keys`: every form of a key, and what it names
* `names`: names of the running model, dialect by dialect
* `param_groups`: the optimizer's groups, and which parameter is in which
* `vocab`: padded vocabularies
* `hybrid`: HybridModel and MambaModel: layers in the order of a pattern
* `adapters`: low-rank adapters (LoRA): their keys, and a model with them merged into its weights
"""
