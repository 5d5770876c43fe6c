#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# Slurm starts one launcher on each host, which numbers itself by SLURM_PROCID: logs, restarts, whose fault it was.
srun onecard run --nproc_per_node 8 --max_restarts 2 train.py "$@"
