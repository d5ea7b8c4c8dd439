#!/usr/bin/env bash
# Check a checkpoint in CI: is it whole, and is it what the baseline is? For GitHub Actions, GitLab, Jenkins, cron.
#
#   CHECKPOINT=s3://bucket/run1_fsdp BASELINE=s3://bucket/run1 example-scripts/ci_check_checkpoint.sh
#
# Exit code: 0 all well, 1 a finding, others as in .github/docs/messages.md (3 not a checkpoint, 4 corrupt, 7 storage ...).
# Settings, each from the environment:
#
#   CHECKPOINT    checkpoint to check (required)
#   BASELINE      checkpoint that it must equal, in any format  [none]
#   VERIFY_ARGS   "" to read no payload, only headers  [--content: read and check every byte]
#   DIFF_ARGS     e.g. "--ignore args* --ulp 1"
#   RESULTS       folder for verify.json, verify.xml (JUnit), diff.json and summary.md  [checkpoint-check]
#   INSPECTOR     the program  [checkpoint-inspector]
set -euo pipefail

[[ -n ${CHECKPOINT:-} ]] || { echo "set CHECKPOINT to the checkpoint to check" >&2 && exit 2; } # 1 is a finding
RESULTS=${RESULTS:-checkpoint-check}
read -r -a inspector <<<"${INSPECTOR:-checkpoint-inspector}"
read -r -a verify_args <<<"${VERIFY_ARGS---content}"
read -r -a diff_args <<<"${DIFF_ARGS:-}"
mkdir -p "$RESULTS"
summary=$RESULTS/summary.md
result=0

verify=("${inspector[@]}" verify "$CHECKPOINT" --quiet "${verify_args[@]}")
code=0
"${verify[@]}" --json --junit "$RESULTS/verify.xml" >"$RESULTS/verify.json" || code=$?
case $code in
    0) printf "## \`%s\` is valid\n" "$CHECKPOINT" >"$summary" ;;
    1)
        printf "## \`%s\` is not valid\n\n" "$CHECKPOINT" >"$summary"
        "${verify[@]}" --format markdown >>"$summary" || true # its code is known
        [[ -z ${GITHUB_ACTIONS:-} ]] || "${verify[@]}" --format github || true
        ;;
    *) printf "## \`%s\` cannot be read (exit code %s)\n" "$CHECKPOINT" "$code" >"$summary" ;;
esac
result=$code

if [[ -n ${BASELINE:-} && $code -le 1 ]]; then
    compare=("${inspector[@]}" diff "$BASELINE" "$CHECKPOINT" "${diff_args[@]}")
    code=0
    "${compare[@]}" --quiet --json >"$RESULTS/diff.json" || code=$?
    case $code in
        0) printf "\nIt equals \`%s\`.\n" "$BASELINE" >>"$summary" ;;
        1)
            printf "\nIt differs from \`%s\`:\n\n\`\`\`\n" "$BASELINE" >>"$summary"
            "${compare[@]}" >>"$summary" || true
            printf '```\n' >>"$summary"
            ;;
        *) printf "\nIt cannot be compared with \`%s\` (exit code %s).\n" "$BASELINE" "$code" >>"$summary" ;;
    esac
    ((result > code)) || result=$code
fi

cat "$summary"
[[ -z ${GITHUB_STEP_SUMMARY:-} ]] || cat "$summary" >>"$GITHUB_STEP_SUMMARY"
exit "$result"
