#!/bin/bash
# Two nodes, one rank per task: srun starts them. From the repository's folder: sbatch examples/slurm/digits.sh
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:10:00
# With GPUs, as many tasks as each node gives: --ntasks-per-node=4 --gpus-per-node=4

set -e
srun python -m rankwise doctor # check the ranks; ends the job with advice if they cannot connect
srun --kill-on-bad-exit=1 python examples/digits.py "$@"
