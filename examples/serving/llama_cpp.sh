#!/usr/bin/env bash
# Serve a checkpoint of `mtsp train` with llama.cpp: tools/engines/install.sh llamacpp puts the converter and llama-server into .venvs/llamacpp.
#     examples/serving/llama_cpp.sh runs/mine/drafter
# Then, elsewhere: python examples/serving/ask.py http://localhost:8080/v1 "What is speculative decoding?"
set -euo pipefail
CHECKPOINT=${1:?usage: $0 CHECKPOINT [launch.py options, for example --target NAME --scheduler scheduler.json]}
shift
exec python "$(dirname "$0")/launch.py" "$CHECKPOINT" --engine llama.cpp --run "$@"
