#!/usr/bin/env bash
# Serve a checkpoint of `mtsp train` with sglang: pip install sglang; needs a GPU. gated, rnn and gru heads are served here only.
#     examples/serving/sglang.sh runs/mine/drafter
# Then, elsewhere: python examples/serving/ask.py http://localhost:30000/v1 "What is speculative decoding?"
set -euo pipefail
CHECKPOINT=${1:?usage: $0 CHECKPOINT [launch.py options, for example --target NAME --scheduler scheduler.json]}
shift
exec python "$(dirname "$0")/launch.py" "$CHECKPOINT" --engine sglang --run "$@"
