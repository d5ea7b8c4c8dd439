"""What the verbs do, as library functions; `cli/` asks for them. They share how a checkpoint is opened and laid out.

* `opened`: a checkpoint opened for reading
* `checkpoint`: `ckpt_tools.open`: a checkpoint as an object that is indexed
* `inspect`: what a checkpoint is and holds
* `inspect_page`: its page
* `dcp_json`: `print-torch-dcp-in-json`
* `print_tensor`: `print-tensor`
* `read_values`: Python values as JSON values
* `conversion`: one conversion: planned, rehearsed, proven, carried out
* `conversion_report`: what a conversion says of itself
* `read_model`: READ: the model in an opened checkpoint
* `convert_options`: what a user may decide about a conversion to Megatron-FSDP or DCP
* `to_fsdp_dtensor`: `convert` to Megatron-FSDP
* `to_dcp`: `convert` to a plain PyTorch state dict
* `relayout_plain`: of what has its keys already
* `version_2`: the names of Megatron-FSDP v2
* `warm_start`: what a job begins with that has an optimizer and has not begun
* `relayout`: `convert` of what is for Megatron-FSDP already
* `to_torch_dist`: `convert` back to 3D parallel
* `placements`: which rank writes which box
* `target_job`: the job that will load an output
* `iterations`: `--iteration all`
* `outputs`: where a result goes, and what is reported of it
* `ls`: `ls`
* `named_tensors`: the tensors of any checkpoint by parameter, layer and role
* `stats`: `stats`
* `stats_page`: its pictures
* `strips`: layers as columns, kinds of tensors as rows
* `pages`: what all pages and drawings share
* `plan`: `plan`
* `picture`: its pictures
* `group_map`: `build-param-group-map`
* `load_dtensors`: a running job's shards, straight from a checkpoint
* `storage_reader`: any checkpoint as what `dcp.load` reads
* `export_options`: what a user may decide about an export
* `export_hf`: `export-hf`
* `export_source`: what an export reads
* `import_hf`: `import-hf`
* `export_peft`: `export-hf --peft`
* `plain_to_hf`: of a plain state dict with Hugging Face names
* `hf_directory`: weight files and what stands beside them
* `hf_parts`: what exports and imports share
* `hf_assets`: tokenizers and the like, which go along with a model
* `verify`: `verify`
* `verify_metadata`: its checks that look at no values
* `verify_masters`: do masters round to weights, and what is known where not
* `diff`: `diff`
* `spelling`: of a state dict and the same one in a wrapper
* `diff_hf`: `diff` of a Hugging Face model and a Megatron checkpoint
* `preflight`: `preflight`
* `launch`: the launch command that it prints
* `modify`: `modify-state-dict`
* `slice`: `slice`
* `slice_plain`: of a plain state dict
* `copy`: `copy`
* `strip`: `strip`
* `repair`: `repair`
* `mend_keys`: what it does to keys of `fsdp_dtensor`
* `restart`: `strip --fresh-optimizer`
* `average`: `average`
* `mean_targets`: of which stored tensors each tensor of a mean is made
* `merge_adapter`: `merge-adapter`
* `adapter_source`: a Megatron checkpoint that holds a low-rank adapter
* `tower_source`: a vision-language model's directory, of which the language model is converted
* `several_parts`: a checkpoint of such a model, whole or its language model alone
* `peft_source`: a PEFT directory, merged into a Hugging Face model's tensors
* `rewrite`: what the editing commands share
"""
