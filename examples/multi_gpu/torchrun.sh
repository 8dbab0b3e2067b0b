#!/usr/bin/env bash
# Train on all GPUs of one machine; the same line resumes a run that was stopped.
#     examples/multi_gpu/torchrun.sh dspark/qwen3_8b training.output_dir=runs/q8
# A target that does not fit on one GPU: add training.shard_target=true.
set -euo pipefail
RECIPE=${1:?usage: $0 RECIPE [key.path=value ...]}
shift
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
mtsp train "$RECIPE" "$@" --dry-run --gpus "$GPUS"
exec torchrun --standalone --nproc-per-node "$GPUS" --no-python mtsp train "$RECIPE" "$@" --resume
