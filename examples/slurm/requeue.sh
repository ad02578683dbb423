#!/bin/bash
# Stop in time, requeue, resume: 90 s before the end of the job's time Slurm sends SIGUSR1 to every task of the step;
# all ranks save after the same step, and the job goes back into the queue. sbatch examples/slurm/requeue.sh FOLDER
#SBATCH --job-name=requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:10:00
#SBATCH --requeue
#SBATCH --signal=USR1@90
#SBATCH --open-mode=append

srun python examples/slurm/requeue.py "$@"
