#!/usr/bin/env bash
# Convert every iteration of a run, the tasks of a job array share them.
#
#   INPUT=/ckpts/run1 OUTPUT=/ckpts/run1_fsdp sbatch --array=0-7 example-scripts/sbatch_convert_iterations.sh
#
# Task 0 of 8 takes the first iteration, the ninth, and so on: any size of array converts all. A task that is
# preempted or near its time limit is requeued and continues; submitted again, it converts what is new. An iteration
# that is not complete is named, and the task continues with the next. Settings, each from the environment:
#
#   INPUT, OUTPUT   the run, and the root to write (required)
#   SBATCH_PARTITION, SBATCH_ACCOUNT   where the job runs and who pays for it; read by sbatch itself
#   CONVERT_ARGS    further options of convert, e.g. "--dp-shard 64 --ep 8"
#   PYTHON          of the environment that has ckpt_tools  [python3]
#
#SBATCH --job-name=convert-iterations
#SBATCH --nodes=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
set -euo pipefail

: "${INPUT:?set INPUT to the run to convert}"
: "${OUTPUT:?set OUTPUT to the root to write}"
: "${SLURM_ARRAY_TASK_ID:?is set by Slurm: submit this script with sbatch --array=0-7}"
PYTHON=${PYTHON:-python3}
read -r -a extra <<<"${CONVERT_ARGS:-}"

# Slurm sends USR1 to this shell some minutes before the time limit: the conversion stops and leaves what --resume
# continues from.
convert='' stopping=''
stop() {
    stopping=1
    [[ -z $convert ]] || kill -TERM "$convert" || true
}
trap stop USR1

numbers=()
for folder in "$INPUT"/iter_*; do
    [[ $folder =~ /iter_([0-9]{7,})$ ]] && numbers+=("$((10#${BASH_REMATCH[1]}))")
done
((${#numbers[@]} > 0)) || { echo "$INPUT holds no iteration" >&2 && exit 3; }
mapfile -t numbers < <(printf '%s\n' "${numbers[@]}" | sort -n)
latest=${numbers[-1]}
if [[ -e $INPUT/latest_checkpointed_iteration.txt ]]; then
    latest=$(<"$INPUT/latest_checkpointed_iteration.txt")
fi

result=0
first=$((SLURM_ARRAY_TASK_ID - ${SLURM_ARRAY_TASK_MIN:-0}))
for ((i = first; i < ${#numbers[@]}; i += ${SLURM_ARRAY_TASK_COUNT:-1})); do
    number=${numbers[i]}
    words=("$INPUT" "$OUTPUT" --iteration "$number") # the output's tracker is to name the run's latest
    if [[ $number != "$latest" ]]; then
        name=$(printf 'iter_%07d' "$number")
        words=("$INPUT/$name" "$OUTPUT/$name")
    fi
    echo "$(date -Is) iteration $number"
    "$PYTHON" -m ckpt_tools convert "${words[@]}" --resume --quiet "${extra[@]}" &
    convert=$!
    code=0
    wait "$convert" || code=$?
    if [[ -n $stopping ]]; then
        wait "$convert" || true # the signal ended the first wait, not the conversion
        echo "$(date -Is) requeued to continue later" >&2
        scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
        exit 143
    fi
    ((code <= result)) || result=$code
done
((result == 0)) || exit "$result"
echo "$(date -Is) done"
