#!/usr/bin/env bash
# Convert a checkpoint with all nodes of a Slurm job.
#
#   INPUT=/ckpts/run1 OUTPUT=/ckpts/run1_fsdp sbatch --nodes=4 example-scripts/sbatch_checkpoint_convert.sh
#
# The output directory must be visible to every node. A job that is killed, preempted, or near its time limit is
# requeued, and --resume skips what is finished. One task starts on each node, which uses all its cores. Settings, each
# from the environment:
#
#   INPUT, OUTPUT     checkpoint to read, directory to write (required)
#   SBATCH_PARTITION, SBATCH_ACCOUNT   where the job runs and who pays for it; read by sbatch itself
#   CONVERT_ARGS      further options of the command, e.g. "--dp-shard 64 --ep 8 --fsync"
#   COMMAND           what to run on the two directories  [convert-torch-dist-to-fsdp-dtensor]
#   CPUS_PER_TASK     CPUs of a node  [all of the first node]
#   VERIFY            1: read the result back and check its structure  [1]
#   REPORT            where the report goes, as JSON  [convert-<job>.json]
#   PYTHON            of the environment that has ckpt_tools  [python3]
#   CONTAINER_IMAGE   image to run in, where Slurm has pyxis; CONTAINER_MOUNTS as --container-mounts takes them
#
#SBATCH --job-name=checkpoint-convert
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
set -euo pipefail

: "${INPUT:?set INPUT to the checkpoint to convert}"
: "${OUTPUT:?set OUTPUT to the directory to write}"
: "${SLURM_JOB_ID:?is set by Slurm: submit this script with sbatch}"
COMMAND=${COMMAND:-convert-torch-dist-to-fsdp-dtensor}
VERIFY=${VERIFY:-1}
REPORT=${REPORT:-convert-$SLURM_JOB_ID.json}
PYTHON=${PYTHON:-python3}

container=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    container+=("--container-image=$CONTAINER_IMAGE")
    [[ -z ${CONTAINER_MOUNTS:-} ]] || container+=("--container-mounts=$CONTAINER_MOUNTS")
fi

read -r -a extra <<<"${CONVERT_ARGS:-}"
convert=("$PYTHON" -m ckpt_tools "$COMMAND" "$INPUT" "$OUTPUT" --resume --report "$REPORT" "${extra[@]}")

# Slurm sends USR1 to this shell some minutes before the time limit. The ranks get SIGTERM, stop cleanly and leave
# the journal that --resume continues from.
stopping=
stop_ranks() {
    stopping=1
    echo "$(date -Is) time is nearly up: stopping the ranks" >&2
    scancel --signal=TERM "$SLURM_JOB_ID" # a signal without --batch reaches the steps only
}
trap stop_ranks USR1

# A job that is requeued after it has published its output (while it verifies, say) must not convert again.
published="${SLURM_SUBMIT_DIR:-.}/.published-by-job-$SLURM_JOB_ID"
if [[ ! -e $published ]]; then
    echo "$(date -Is) start ${SLURM_RESTART_COUNT:-0}: $SLURM_JOB_NUM_NODES nodes: $INPUT -> $OUTPUT"
    # One rank's death ends the step: without its share the others can only wait.
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --cpus-per-task="${CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" --kill-on-bad-exit=1 --label \
        "${container[@]}" "${convert[@]}" &
    step=$!
    interrupted=$((128 + $(kill -l USR1))) # a trapped signal ends the wait, not the step
    code=$interrupted
    while [[ $code == "$interrupted" ]]; do
        code=0
        wait "$step" || code=$?
    done

    if [[ -n $stopping && $code != 0 ]]; then
        echo "$(date -Is) requeued to continue later" >&2
        scontrol requeue "$SLURM_JOB_ID"
        exit "$code"
    fi
    [[ $code == 0 ]] || exit "$code"
    touch "$published"
fi

if [[ $VERIFY == 1 ]]; then
    srun --nodes=1 --ntasks=1 "${container[@]}" "$PYTHON" -m ckpt_tools verify "$OUTPUT"
fi
rm -f "$published"
echo "$(date -Is) done"
