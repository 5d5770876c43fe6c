#!/bin/bash
# LLaMA-3 8B on one host of H100s, in float8.
OUT=${1:-"checkpoints/llama3"}
TOKENIZER=${2:-"MOCK"}
TP_SIZE=1
CP_SIZE=1
DTYPE="fp8"
mkdir -p "$(dirname "$OUT")"

LAUNCH=(--nproc_per_node 8 --nnodes 1 --node_rank ${NODE_RANK:-0})
MODEL=(
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --rotary-base 1000000 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
    --attention-backend fused --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 128 --lr 0.00015 --bf16 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
)
PRECISION=()
if [[ "$DTYPE" == "fp8" ]]; then
    PRECISION+=("--fp8-format hybrid" "--fp8-amax-history-len 1024" "--fp8-param-gather")
fi
PARALLEL=(
    --tensor-model-parallel-size $TP_SIZE
    --context-parallel-size $CP_SIZE
    # --pipeline-model-parallel-size 4
    --sequence-parallel
)
STATES=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
TRAINING+=("${STATES[@]}")

DATA=()
if [[ "$TOKENIZER" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    DATA+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--split '99,1,0'")
else
    DATA+=("--tokenizer-model $TOKENIZER" "--vocab-size 128000")
fi

if [ ! -f "pretrain_gpt.py" ]; then
    echo "start this in the root of Megatron-LM"
    exit 1
fi

torchrun ${LAUNCH[@]} \
    "pretrain_gpt.py" \
    ${MODEL[@]} \
    ${TRAINING[@]} \
    ${PRECISION[@]} \
    ${PARALLEL[@]} \
    ${DATA[@]} --log-interval 1
