#!/usr/bin/env bash
# Git hook: refuse a commit that leaves a checkpoint in the repository (test data, say) damaged or incomplete.
#
#   ln -s ../../example-scripts/pre-commit-verify-checkpoints.sh .git/hooks/pre-commit
#
# or with the pre-commit program, in .pre-commit-config.yaml:
#
#   - repo: local
#     hooks:
#       - id: verify-checkpoints
#         name: verify checkpoints
#         language: script
#         entry: example-scripts/pre-commit-verify-checkpoints.sh
#         files: (\.metadata|\.distcp|\.safetensors)$
#
# INSPECTOR is the program to use  [checkpoint-inspector]
set -euo pipefail

read -r -a inspector <<<"${INSPECTOR:-checkpoint-inspector}"
files=("$@")
if ((${#files[@]} == 0)); then # git itself gives no names
    mapfile -d '' -t files < <(git diff --cached --name-only -z -- '*.metadata' '*.distcp' '*.safetensors')
fi
declare -A seen=()
result=0
for file in "${files[@]}"; do
    folder=$(dirname "$file")
    if [[ -n ${seen[$folder]:-} || ! -d $folder ]]; then # done, or deleted by this commit
        continue
    fi
    seen[$folder]=1
    "${inspector[@]}" verify "$folder" --content --quiet || result=1
done
exit "$result"
