#!/usr/bin/env bash
# Convert a checkpoint with all ranks of a Slurm job.
#
#   INPUT=/ckpts/run1 OUTPUT=/ckpts/run1_fsdp sbatch --nodes=4 example-scripts/sbatch_checkpoint_convert.sh
#
# The output directory must be visible to every node. A job that is killed, preempted, or near its time limit is
# requeued, and --resume skips what is finished. The ranks meet through torch: pip install '.[torch]'. Settings, each
# from the environment:
#
#   INPUT, OUTPUT     checkpoint to read, directory to write (required)
#   SBATCH_PARTITION, SBATCH_ACCOUNT   where the job runs and who pays for it; read by sbatch itself
#   CONVERT_ARGS      further options of the command, e.g. "--dp-shard 64 --ep 8 --fsync"
#   COMMAND           what to run on the two directories  [convert-torch-dist-to-fsdp-dtensor]
#   LAUNCHER          srun: one task a rank; torchrun: one task a node, which starts the ranks  [srun]
#   RANKS_PER_NODE    processes on a node  [4]
#   CPUS_PER_RANK     CPUs of a process, for srun --cpus-per-task  [what Slurm gives]
#   VERIFY            1: read the result back and check its structure  [1]
#   REPORT            where the report goes, as JSON  [convert-<job>.json]
#   PYTHON, TORCHRUN  programs of the environment that has ckpt_tools  [python3, torchrun]
#   CONTAINER_IMAGE   image to run in, where Slurm has pyxis; CONTAINER_MOUNTS as --container-mounts takes them
#   MASTER_ADDR       node at which the ranks meet  [the job's first]
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
LAUNCHER=${LAUNCHER:-srun}
RANKS_PER_NODE=${RANKS_PER_NODE:-4}
VERIFY=${VERIFY:-1}
REPORT=${REPORT:-convert-$SLURM_JOB_ID.json}
PYTHON=${PYTHON:-python3}
TORCHRUN=${TORCHRUN:-torchrun}

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))} # two jobs on one node do not meet
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=1 # the converter has its own threads (--threads)

container=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    container+=("--container-image=$CONTAINER_IMAGE")
    [[ -z ${CONTAINER_MOUNTS:-} ]] || container+=("--container-mounts=$CONTAINER_MOUNTS")
fi

read -r -a extra <<<"${CONVERT_ARGS:-}"
convert=(-m ckpt_tools "$COMMAND" "$INPUT" "$OUTPUT" --resume --report "$REPORT" "${extra[@]}")
case $LAUNCHER in
    srun)
        tasks=$RANKS_PER_NODE
        program=("$PYTHON" "${convert[@]}")
        ;;
    torchrun)
        tasks=1
        program=("$TORCHRUN" --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$RANKS_PER_NODE"
            --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
            --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" "${convert[@]}")
        ;;
    *)
        echo "LAUNCHER is srun or torchrun, not $LAUNCHER" >&2
        exit 2
        ;;
esac
cpus=()
[[ -z ${CPUS_PER_RANK:-} ]] || cpus=("--cpus-per-task=$((CPUS_PER_RANK * RANKS_PER_NODE / tasks))")

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
    echo "$(date -Is) start ${SLURM_RESTART_COUNT:-0}: $SLURM_JOB_NUM_NODES nodes, $RANKS_PER_NODE ranks each: $INPUT -> $OUTPUT"
    # One rank's death ends the step: without its share the others can only wait.
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * tasks))" --ntasks-per-node="$tasks" \
        --kill-on-bad-exit=1 --label "${cpus[@]}" "${container[@]}" "${program[@]}" &
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
