#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
# Slurm starts the ranks: onecard reads SLURM_PROCID and the others, and they meet at the first host of the job.
srun python train.py "$@"
