#!/usr/bin/env bash
# Convert the real checkpoint that comes with the repository and look at the result.
#
#   bash example-scripts/quickstart.sh [OUTPUT_DIR]
#
# Makes .venv on first use, of about 120 MB: nothing here needs torch. Set PYTHON to use an environment that has
# ckpt_tools already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
  if [[ ! -x .venv/bin/checkpoint-inspector ]]; then
    python3 -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check -e .
  fi
  PYTHON=.venv/bin/python
fi

source_dir=tests/data/core019_llama_tp2_fully_reshardable
output_dir=${1:-$(mktemp -d)/llama_fsdp_dtensor}

echo "1. What is in the torch_dist checkpoint?"
"$PYTHON" -m ckpt_tools inspect "$source_dir"

echo "2. Convert it for Megatron-FSDP."
"$PYTHON" -m ckpt_tools convert "$source_dir" "$output_dir"

echo "3. What came out?"
"$PYTHON" -m ckpt_tools inspect "$output_dir" --keys 'model.module.decoder.layers.0.*'

echo "Done: $output_dir is ready for --load; it is yours to keep or to remove."
