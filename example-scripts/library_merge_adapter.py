"""Merge a LoRA adapter of Megatron-Bridge into its base, and write it as a PEFT directory.

python example-scripts/library_merge_adapter.py RUN ADAPTER out/merged out/hf out/peft
"""

import sys

from ckpt_tools import ExportOptions, MergeOptions, export_hf, merge_adapter

if len(sys.argv) != 6:
    sys.exit(__doc__)

base, adapter, merged, model, peft = sys.argv[1:]
report = merge_adapter(base, adapter, merged, MergeOptions(overwrite=True))
for note in report.notes:
    print(note)

export_hf(base, model)
report = export_hf(adapter, peft, ExportOptions(peft=True, hf_config=model))
print(f"{report.architecture}: {report.tensors} matrices")
