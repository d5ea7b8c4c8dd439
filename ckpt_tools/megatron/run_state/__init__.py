"""What a run saved once for all ranks: arguments, settings, records.

* `common_state`: arguments, schedule, groups, progress; the files of Megatron-Bridge
* `settings`: the few training settings that decide a conversion: names, types, tensor-parallel sizes
* `layer_settings`: settings that say something of each layer, for a part of the layers
* `stored_values`: what stored values must be, checked where they are read
* `record`: `ckpt_tools.json`: for which job an output was made
"""
