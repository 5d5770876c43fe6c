#!/bin/bash
# One host: nothing more is needed. Several: name the host of rank 0, as MPI does not tell where it is.
if [ -z "$HOSTS" ]; then
    exec mpirun -np "${RANKS:-2}" python train.py "$@"
fi
exec mpirun -np "$RANKS" --host "$HOSTS" -x MASTER_ADDR="${HOSTS%%[:,]*}" -x MASTER_PORT="${MASTER_PORT:-29500}" python train.py "$@"
