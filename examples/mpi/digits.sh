#!/bin/bash
# One node: examples/mpi/digits.sh. The launcher is MPIRUN: Open MPI's mpirun, or MPICH's and Intel's mpiexec.hydra.

set -e
mpirun=${MPIRUN:-mpirun}
ranks=${RANKS:-2}
$mpirun -n "$ranks" python -m rankwise doctor
$mpirun -n "$ranks" python examples/digits.py "$@"
