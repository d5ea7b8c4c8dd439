#!/usr/bin/env bash
# Train DeepSeek-V3 (671B) with Megatron-FSDP from a converted checkpoint.
#
#   CHECKPOINT=/ckpts/dsv3_fsdp SAVE=/ckpts/dsv3_run MEGATRON=/src/Megatron-LM \
#       sbatch --nodes=64 example-scripts/sbatch_mfsdp_deepseek_v3.sh
#
# Make CHECKPOINT with sbatch_checkpoint_convert.sh; with the same sizes there, each rank reads one file
# sequentially:  CONVERT_ARGS="--dp-shard 512 --ep 8"  for 64 nodes. Settings, each from the environment:
#
#   SBATCH_PARTITION, SBATCH_ACCOUNT   where the job runs and who pays for it; read by sbatch itself
#   CHECKPOINT       fsdp_dtensor checkpoint to start from (required)
#   SAVE             where checkpoints go; a job that finds one there continues from it (required)
#   MEGATRON         checkout of Megatron-LM (required)
#   DATA_PATH, TOKENIZER_MODEL   data as --data-path takes it and its tokenizer  [mock data]
#   TP, EP, CP       parallel sizes; everything else shards  [1, 8, 1]
#   MBS, GBS, SEQ_LEN, TRAIN_ITERS   micro and global batch, sequence length, steps  [1, 2048, 4096, 1000]
#   MINUTES          after which a job saves and leaves; below the time limit  [225]
#   WEIGHTS_ONLY     1: CHECKPOINT has no optimizer state, start a new one; Megatron core 0.18 and later cannot  [0]
#   TARGET           version that MEGATRON is, as preflight names it (core-0.16 to core-0.19, main)
#                    [the one that CHECKPOINT was converted for, else main]
#   EXTRA_ARGS       further flags of pretrain_gpt.py
#   PYTHON, TORCHRUN programs of the environment that has ckpt_tools and torch  [python3, torchrun]
#   CONTAINER_IMAGE  image to run in, where Slurm has pyxis; CONTAINER_MOUNTS as --container-mounts takes them
#
#SBATCH --job-name=mfsdp-deepseek-v3
#SBATCH --nodes=64
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail

: "${CHECKPOINT:?set CHECKPOINT to the fsdp_dtensor checkpoint to start from}"
: "${SAVE:?set SAVE to the directory for new checkpoints}"
: "${MEGATRON:?set MEGATRON to a checkout of Megatron-LM}"
: "${SLURM_JOB_ID:?is set by Slurm: submit this script with sbatch}"
TP=${TP:-1} EP=${EP:-8} CP=${CP:-1}
MBS=${MBS:-1} GBS=${GBS:-2048} SEQ_LEN=${SEQ_LEN:-4096} TRAIN_ITERS=${TRAIN_ITERS:-1000} MINUTES=${MINUTES:-225}
PYTHON=${PYTHON:-python3}
TORCHRUN=${TORCHRUN:-torchrun}

# With 1 connection, kernels of all streams are queued in one order: FSDP's gathers would wait for the computation
# that they are meant to overlap. TP and CP would like 1; FSDP needs the default.
unset CUDA_DEVICE_MAX_CONNECTIONS
# Memory that NCCL has registered cannot be remapped: no expandable segments together with --use-nccl-ub.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:False}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}

load=$CHECKPOINT first_start=1
if [[ -e $SAVE/latest_checkpointed_iteration.txt ]]; then # this job, or one before it, has saved already
    load=$SAVE first_start=0
fi

required=(
    --use-megatron-fsdp                                  # Megatron-FSDP in the place of DistributedDataParallel
    --data-parallel-sharding-strategy optim_grads_params # ZeRO-3: weights, gradients and optimizer are sharded
    --use-distributed-optimizer                          # the optimizer steps on its shard alone
    --no-gradient-accumulation-fusion                    # the fused kernel adds to a full gradient, which is not kept
    --ckpt-format fsdp_dtensor                           # what Megatron-FSDP saves and loads
    --pipeline-model-parallel-size 1                     # sharding takes the place of pipeline stages
)
recommended=(
    --init-model-with-meta-device # 671B parameters are first made where they stay: shard by shard
    --calculate-per-token-loss    # gradients are scaled once a step, not once a micro-batch
    --grad-reduce-in-bf16         # half of the reduce-scatter's bytes
    --overlap-grad-reduce         # reduce-scatter of a layer behind the backward pass of the next
    --overlap-param-gather        # all-gather of a layer behind the computation of the one before
    --fsdp-double-buffer          # two lasting communication buffers: no fragmentation; layers must be equal
    --use-nccl-ub                 # those buffers registered with NCCL: collectives leave more SMs to the model
)
parallel=(
    --tensor-model-parallel-size "$TP"
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP"
    --expert-tensor-parallel-size 1
)
((TP == 1)) || parallel+=(--sequence-parallel)
model=( # config.json of deepseek-ai/DeepSeek-V3
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --position-embedding-type rope --rotary-base 10000 --rotary-scaling-factor 40
    --mscale 1.0 --mscale-all-dim 1.0 --max-position-embeddings 163840
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --vocab-size 129280 --make-vocab-size-divisible-by 128
    --num-experts 256 --moe-layer-freq "([0]*3+[1]*58)" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-grouped-gemm
    --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall --moe-permute-fusion
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
    --attention-dropout 0 --hidden-dropout 0 --transformer-impl transformer_engine
)
training=(
    --bf16 --micro-batch-size "$MBS" --global-batch-size "$GBS" --seq-length "$SEQ_LEN"
    --train-iters "$TRAIN_ITERS" --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 100
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --recompute-granularity selective --recompute-modules mla_up_proj mlp moe_act
    --load "$load" --save "$SAVE" --save-interval 200 --eval-interval 1000
    --exit-duration-in-mins "$MINUTES" # save and leave before Slurm ends the job; the next job continues
    --distributed-timeout-minutes 60 --log-interval 1
    --eval-iters 0 --eval-interval 1000 # the interval has no default in Megatron main
)
[[ ${WEIGHTS_ONLY:-0} == 0 || $first_start == 0 ]] || training+=(--no-load-optim --no-load-rng --finetune)
if [[ -n ${DATA_PATH:-} ]]; then
    read -r -a blend <<<"$DATA_PATH"
    data=(--data-path "${blend[@]}" --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER_MODEL:?set TOKENIZER_MODEL for DATA_PATH}")
else
    data=(--mock-data --tokenizer-type NullTokenizer)
fi
read -r -a extra <<<"${EXTRA_ARGS:-}"
flags=("${required[@]}" "${recommended[@]}" "${parallel[@]}" "${model[@]}" "${training[@]}" "${data[@]}" "${extra[@]}")

container=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    container+=("--container-image=$CONTAINER_IMAGE")
    [[ -z ${CONTAINER_MOUNTS:-} ]] || container+=("--container-mounts=$CONTAINER_MOUNTS")
fi

# Seconds on one CPU core before hours on every GPU: do checkpoint and flags fit each other?
srun --nodes=1 --ntasks=1 "${container[@]}" "$PYTHON" -m ckpt_tools preflight "$load" ${TARGET:+--target "$TARGET"} -- \
    "PYTORCH_CUDA_ALLOC_CONF=$PYTORCH_CUDA_ALLOC_CONF" "${flags[@]}"

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --label \
    "${container[@]}" "$TORCHRUN" --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \
    --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" "$MEGATRON/pretrain_gpt.py" "${flags[@]}"
