"""Export to Hugging Face, and import the model again for Megatron-FSDP.

python example-scripts/library_huggingface.py tests/data/core019_llama_tp2_fully_reshardable out/hf out/run
"""

import sys

from ckpt_tools import ExportOptions, ImportOptions, Layout, TargetOptions, Topology, export_hf, import_hf

if len(sys.argv) < 4:
    sys.exit(__doc__)

source, model, run = sys.argv[1:]
report = export_hf(source, model, ExportOptions(dtype="bfloat16", max_shard_bytes=2 * 10**9))
print(f"{report.architecture}: {report.tensors} tensors")
for note in report.notes:
    print(f"  {note}")

# Megatron-FSDP of core 0.18 and later starts with a fresh optimizer, which needs these settings.
fresh = TargetOptions(lr=1e-5, min_lr=1e-6, weight_decay=0.1)
layout = Layout("mfsdp-v1", Topology(dp_shard=2))
report = import_hf(model, run, ImportOptions(to="fsdp_dtensor", layout=layout, fsdp=fresh))
print(f"{report.output_format}: {report.tensors} tensors for {layout.ranks} ranks")
