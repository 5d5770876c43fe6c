#!/bin/bash
# GPT-3 175B. The public script starts one host; how many it needs is for its reader to say.
PER_HOST=8
HOSTS=${HOSTS:-1}
RANKS=$(($PER_HOST * $HOSTS))
MERGES=$1/gpt2-merges.txt

LAUNCH=(--nproc_per_node $PER_HOST --nnodes $HOSTS --master_addr ${MASTER:-localhost})
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto   # or flash, fused, unfused, local
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
)
PARALLEL=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)

torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} ${TRAINING[@]} \
    ${PARALLEL[@]} \
    --merge-file $MERGES --vocab-file $1/gpt2-vocab.json --save "$2" --log-interval 100
