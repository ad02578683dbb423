#!/bin/bash
# Two nodes: run this on both, with the name of one of them: MAIN_NODE=gpu01 examples/torchrun/two_nodes.sh

set -e
port=${MAIN_PORT:-29400}
nodes=(--nnodes 2 --nproc-per-node "${RANKS_PER_NODE:-1}" --rdzv-backend c10d)
torchrun "${nodes[@]}" --rdzv-id doctor --rdzv-endpoint "${MAIN_NODE:?}:$((port + 1))" -m rankwise doctor
torchrun "${nodes[@]}" --rdzv-id digits --rdzv-endpoint "${MAIN_NODE:?}:$port" examples/digits.py "$@"
