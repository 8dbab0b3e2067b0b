"""From a checkpoint to a running engine: export, prove, and start (or print) the engine's own launch line.

    python examples/serving/launch.py runs/mine/drafter --engine vllm                  # prints the line
    python examples/serving/launch.py runs/mine/drafter --engine llama.cpp --run       # starts it

The line comes from the export itself, so method, draft length and flags are those that the drafter was trained for.
The engine must be installed in the environment that runs it; for llama.cpp the converter and `llama-server` must be on
PATH.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import modelopt_spec as mtsp
from modelopt_spec.checkpoints.opening import recorded_target
from modelopt_spec.checkpoints.preflight import check
from modelopt_spec.targets.load import load_target, load_tokenizer
from modelopt_spec.targets.packaged import resolve_target

ENGINES = ("vllm", "sglang", "llama.cpp", "tensorrt_llm")


def prepare(checkpoint: Path, engine: str, out: Path, target: str | None, scheduler: Path | None, dtype: str) -> str:
    """Export for one engine, prove that it will serve what was trained, and return its launch line."""
    name = target or recorded_target(checkpoint)
    report = mtsp.export(
        checkpoint, out, engines=[engine], dtype=dtype, scheduler=scheduler, overwrite=True, quiet=True
    )
    verdict = check(out, load_target(name), (engine,), tokenizer=load_tokenizer(name), quiet=True)
    if verdict.exit_status:
        verdict.show()
        raise SystemExit(1)
    return report.launch[engine].replace(name, str(resolve_target(name)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--out", type=Path, default=Path("draft"))
    parser.add_argument("--target")
    parser.add_argument("--scheduler", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--run", action="store_true", help="start the engine instead of printing its line")
    options = parser.parse_args(arguments)
    line = prepare(options.checkpoint, options.engine, options.out, options.target, options.scheduler, options.dtype)
    print(line)
    if not options.run:
        return
    if options.engine == "tensorrt_llm":
        line, settings = line.split("   # options.yaml: ", 1)
        Path("options.yaml").write_text(settings + "\n")
    sys.exit(subprocess.run(["bash", "-c", f"set -e; {line}"], check=False).returncode)


if __name__ == "__main__":
    main()
