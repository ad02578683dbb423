#!/bin/bash
# One node, as many ranks as RANKS says: examples/torchrun/one_node.sh

set -e
torchrun --standalone --nproc-per-node "${RANKS:-2}" -m rankwise doctor
torchrun --standalone --nproc-per-node "${RANKS:-2}" examples/digits.py "$@"
