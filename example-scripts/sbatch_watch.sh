#!/usr/bin/env bash
# Convert each new iteration of a run while a training job writes it, until that job has ended.
#
#   INPUT=/ckpts/run1 OUTPUT=/ckpts/run1_fsdp TRAIN_JOB=4711 sbatch example-scripts/sbatch_watch.sh
#
# Near its time limit the watcher is requeued and goes on where it was. Settings, each from the environment:
#
#   INPUT, OUTPUT   the run, and the root to write (required)
#   THEN            what is done with an iteration  [convert]; e.g. "convert --gpus 64 --tp 8", "verify --content"
#   TRAIN_JOB       ends when this job has: after a last look. Without it, only scancel ends it
#   EVERY           seconds between two looks  [60]
#   PYTHON          of the environment that has ckpt_tools  [python3]
#
#SBATCH --job-name=ckpt-watch
#SBATCH --nodes=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
set -euo pipefail

: "${INPUT:?set INPUT to the run to watch}"
: "${OUTPUT:?set OUTPUT to the root to write}"
: "${SLURM_JOB_ID:?is set by Slurm: submit this script with sbatch}"
THEN=${THEN:-convert}
EVERY=${EVERY:-60}
PYTHON=${PYTHON:-python3}

# Slurm sends USR1 to this shell some minutes before the time limit.
child='' stopping=''
stop() {
    stopping=1
    [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true
}
trap stop USR1

# Whether the training job has ended. A controller that does not answer says nothing about it.
has_ended() {
    local said
    said=$(squeue --noheader --format=%T --jobs="$TRAIN_JOB" 2>&1) || {
        [[ $said == *"Invalid job id"* ]]
        return
    }
    [[ -z $said ]]
}

while [[ -z $stopping ]]; do
    last=''
    if [[ -n ${TRAIN_JOB:-} ]] && has_ended; then
        last=1
    fi
    "$PYTHON" -m ckpt_tools watch "$INPUT" "$OUTPUT" --then "$THEN" --once --every "$EVERY" --quiet &
    child=$!
    code=0
    wait "$child" || code=$?
    if [[ -z $stopping ]]; then
        ((code != 2)) || exit 2 # the settings are wrong, or another watcher is at work
        [[ -z $last ]] || exit "$code"
        sleep "$EVERY" &
        child=$!
        wait "$child" || true
    fi
done
if [[ -n $stopping ]]; then
    wait "$child" || true # the signal ended the first wait, not the conversion
    echo "$(date -Is) requeued to go on later" >&2
    scontrol requeue "$SLURM_JOB_ID"
    exit 143
fi
