#!/usr/bin/env bash
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --time=04:00:00 --signal=TERM@300
# Several machines under SLURM, one task a GPU. Before the time limit every process saves and ends, and the job queues
# itself again until the run has its report.
#     sbatch examples/multi_gpu/slurm.sh dspark/qwen3_8b /shared/runs/q8
set -euo pipefail
RECIPE=${1:?usage: sbatch $0 RECIPE OUTPUT_DIR [key.path=value ...]}
RUN=${2:?usage: sbatch $0 RECIPE OUTPUT_DIR [key.path=value ...]}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500 RECIPE RUN OVERRIDES="${*:3}"
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
    exec mtsp train "$RECIPE" --resume training.output_dir="$RUN" $OVERRIDES'
[ -f "$RUN/report.json" ] || sbatch "$0" "$@"
