"""Processor time of one decision of the scheduler: which draft tokens of R requests with G slots are verified.

    python -m benchmarks.scheduler            # 512 requests x 16 slots, both rules, ragged and padded

Processor seconds of one thread: the median over batches of calls, and the least of them, which is what the code costs
when nothing else takes the caches.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelopt_spec.scheduling.cost import AdditiveCostTable, CostTable
from modelopt_spec.scheduling.policies import PrefixScheduler

CALLS = 20


def staircase(tokens: int) -> CostTable:
    """A table with a cliff every 256 batch tokens."""
    knots = tuple(range(1, tokens, 64))
    return CostTable(knots, tuple(1.0 / (0.01 + 2e-6 * knot + 1e-3 * (knot // 256)) for knot in knots))


def additive(requests: int, tokens: int) -> AdditiveCostTable:
    """A two-axis table: flat while memory-bound, then rising."""
    probes = tuple(int(v) for v in np.unique(np.geomspace(1, tokens, 24).astype(int)))
    theta = tuple(max(0.0, 5e-6 * (probe - 256)) for probe in probes)
    return AdditiveCostTable(0.01, (1, requests), (0.0, 0.004), probes, theta)


def measure(requests: int, slots: int, repeats: int, seed: int = 0) -> dict[str, Any]:
    """Milliseconds a decision of each rule."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(1.0, 1.5, (8, requests, slots)))
    names = list(range(requests))
    most = requests * (slots + 1)
    temperatures = [1.2] * slots
    rules = {
        "early_stop, two axes": PrefixScheduler(
            additive(requests, most), slots, temperatures=temperatures, method="early_stop"
        ),
        "global_stale, two axes": PrefixScheduler(additive(requests, most), slots, temperatures=temperatures),
        "global_stale, staircase": PrefixScheduler(staircase(most), slots, temperatures=temperatures),
        "global_stale, padded": PrefixScheduler(
            additive(requests, most), slots, temperatures=temperatures, padded=True
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in rules}
    for repeat in range(repeats + 1):
        for name, rule in rules.items():
            start = time.process_time()
            for call in range(CALLS):
                rule.lengths(logits[call % len(logits)], request_ids=names)
            if repeat:
                times[name].append(1e3 * (time.process_time() - start) / CALLS)
    return {
        "requests": requests,
        "slots": slots,
        "milliseconds": {
            name: {"median": float(np.median(values)), "least": min(values)} for name, values in times.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options.requests, options.slots, options.repeats)
    for name, value in result["milliseconds"].items():
        print(f"{name:26s} {value['median']:.3f} ms (least {value['least']:.3f})")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
