#!/bin/bash
# One node, one task, no srun: strategy "ddp" starts the ranks. sbatch examples/slurm/one_node.sh
#SBATCH --job-name=digits
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00

set -e
python -m rankwise doctor --devices 2 --no-start-methods
python examples/digits.py --strategy ddp --devices 2 "$@"
