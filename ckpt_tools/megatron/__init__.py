"""What keys mean: from stored keys to a `Model`, and from a `Model` to the keys of an output.

* `torch_dist/`: Megatron's own format, read and written, with its optimizer layouts
* `fsdp_dtensor/`: Megatron-FSDP's format, read and written
* `dcp/`: any PyTorch state dict: keys sorted, Megatron models read and written
* `huggingface/`: Hugging Face models: rules, settings, ledgers
* `format`: what differs between formats: which tensors are weights, masters, states
* `keys`: every form of a key, and what it names
* `names`: names of the running model, dialect by dialect
* `param_groups`: the optimizer's groups, and which parameter is in which
* `vocab`: padded vocabularies
* `common_state`: what a run saved once for all ranks
* `stored_values`: what stored values must be, checked where they are read
* `settings`: the few training settings that decide a conversion
* `layer_settings`: settings that say something of each layer, for a part of the layers
* `fp8_held`: which parameters the running model holds in FP8
* `bridge`: the files that Megatron-Bridge keeps beside a checkpoint
* `hybrid`: HybridModel and MambaModel: layers in the order of a pattern
* `record`: `ckpt_tools.json`: for which job an output was made
* `parallel_sizes`: which tensor-parallel sizes a model has
* `adapters`: low-rank adapters (LoRA): their keys, and which weights they are added to
* `merged`: a model with adapters merged into its weights
* `rebase`: targets over parameters, as targets over stored tensors
"""
