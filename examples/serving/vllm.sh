#!/usr/bin/env bash
# Serve a checkpoint of `mtsp train` with vllm: pip install vllm (GPU), or tools/engines/install.sh vllm for the CPU build.
#     examples/serving/vllm.sh runs/mine/drafter
# Then, elsewhere: python examples/serving/ask.py http://localhost:8000/v1 "What is speculative decoding?"
set -euo pipefail
CHECKPOINT=${1:?usage: $0 CHECKPOINT [launch.py options, for example --target NAME --scheduler scheduler.json]}
shift
exec python "$(dirname "$0")/launch.py" "$CHECKPOINT" --engine vllm --run "$@"
