#!/usr/bin/env bash
# Serve a checkpoint of `mtsp train` with tensorrt_llm: a TensorRT-LLM container; needs a GPU.
#     examples/serving/tensorrt_llm.sh runs/mine/drafter
# Then, elsewhere: python examples/serving/ask.py http://localhost:8000/v1 "What is speculative decoding?"
set -euo pipefail
CHECKPOINT=${1:?usage: $0 CHECKPOINT [launch.py options, for example --target NAME --scheduler scheduler.json]}
shift
exec python "$(dirname "$0")/launch.py" "$CHECKPOINT" --engine tensorrt_llm --run "$@"
