#!/usr/bin/env bash
# The same through accelerate, with a configuration made by `accelerate config` (or its defaults).
#     examples/multi_gpu/accelerate.sh dspark/qwen3_8b training.output_dir=runs/q8
set -euo pipefail
RECIPE=${1:?usage: $0 RECIPE [key.path=value ...]}
shift
exec accelerate launch --multi_gpu --num_processes "${GPUS:-8}" -m modelopt_spec.cli train "$RECIPE" "$@" --resume
