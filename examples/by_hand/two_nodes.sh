#!/bin/bash
# Two nodes and no scheduler: strategy "ddp" starts the other ranks of each. On the first node, then on the second:
#   NODE_RANK=0 MASTER_ADDR=gpu01 examples/by_hand/two_nodes.sh
#   NODE_RANK=1 MASTER_ADDR=gpu01 examples/by_hand/two_nodes.sh

set -e
export NODE_RANK=${NODE_RANK:?} MASTER_ADDR=${MASTER_ADDR:?} MASTER_PORT=${MASTER_PORT:-29500}
MASTER_PORT=$((MASTER_PORT + 1)) python -m rankwise doctor --num-nodes 2 --devices "${RANKS_PER_NODE:-2}"
python examples/digits.py --num-nodes 2 --devices "${RANKS_PER_NODE:-2}" "$@"
