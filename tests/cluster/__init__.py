"""Tests under real launchers: torchrun, later Slurm and Open MPI."""
