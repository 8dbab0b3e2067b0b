"""Measured throughput of batched ``generate``: what the simulation is compared with.

Prompts are decoded in batches of as many rows as the load says, each batch until all of its rows have ended; only the
rounds are timed, from the first draft to the last token. The result (JSON, ``mtsp simulate --measured`` reads it)::

    {"kind": "mtsp.measured_throughput", "version": 1, "clock": "cpu" | "wall", "threads": int, "max_new_tokens": int,
     "repeats": n, "prompts": {load: prompts},
     "points": [{"policy", "load", "throughput", "repeats": [throughput], "tokens"}]}

``throughput`` is the median over the repeats, in tokens committed by rounds a second of the rounds. Processor seconds
(``clock="cpu"``) are what an idle machine's wall clock would show, for one thread of a shared machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.policies import LengthPolicy

__all__ = ["MEASURED_KIND", "ThroughputMeasurement", "merge_measured"]

MEASURED_KIND = "mtsp.measured_throughput"

PolicyMaker = Callable[[], LengthPolicy]


class _Watched:
    """A policy whose first question, which opens the first round, starts the clock."""

    def __init__(self, policy: LengthPolicy, clock: Callable[[], float]) -> None:
        self._policy, self._clock = policy, clock
        self.started: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def speculates(self) -> bool:
        """The policy's own answer; the decoding loop asks at the start of each round."""
        if self.started is None:
            self.started = self._clock()
        return self._policy.speculates


@dataclass
class ThroughputMeasurement:
    """Repeats that are added one by one, so that other measurements can be made in between."""

    model: nn.Module
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    max_new_tokens: int
    eos_token_ids: Sequence[int] = ()
    num_draft_tokens: int | None = None
    clock: Callable[[], float] = time.process_time
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, policies: Mapping[str, PolicyMaker], load: int, count: int | None = None) -> None:
        """Measure each policy once at one load.

        Args:
            policies: a fresh policy for each batch, by name.
            load: rows of a batch.
            count: use the first ``count`` prompts; default all.
        """
        count = len(self.prompts) if count is None else count
        if not 1 <= load <= count <= len(self.prompts):
            raise ConfigError(f"load {load} and {count} of {len(self.prompts)} prompts: a batch needs its prompts")
        if self.counts.setdefault(load, count) != count:
            raise ConfigError(f"load {load} was measured with {self.counts[load]} prompts before, not {count}")
        for name, make in policies.items():
            spent, tokens = 0.0, 0
            for begin in range(0, count, load):
                seconds, committed = self._batch(self.prompts[begin : min(begin + load, count)], make())
                spent, tokens = spent + seconds, tokens + committed
            if not tokens:
                raise DataError(f"no round was needed for {count} prompts: their answers end at once; use other ones")
            self.seconds.setdefault((name, load), []).append(spent)
            self.tokens[name, load] = tokens

    def report(self) -> dict[str, Any]:
        """The JSON of the module's docstring."""
        points = []
        for (name, load), times in self.seconds.items():
            rates = [self.tokens[name, load] / seconds for seconds in times]
            points.append(
                {
                    "policy": name,
                    "load": load,
                    "throughput": float(np.median(rates)),
                    "repeats": rates,
                    "tokens": self.tokens[name, load],
                }
            )
        return {
            "kind": MEASURED_KIND,
            "version": 1,
            "clock": "cpu" if self.clock is time.process_time else "wall",
            "threads": torch.get_num_threads(),
            "max_new_tokens": self.max_new_tokens,
            "repeats": max((len(times) for times in self.seconds.values()), default=0),
            "prompts": {str(load): count for load, count in self.counts.items()},
            "points": points,
        }

    def _batch(self, prompts: Sequence[Sequence[int]], policy: LengthPolicy) -> tuple[float, int]:
        """Seconds of the rounds and tokens that they committed."""
        from modelopt_spec.decoding.generate import generate
        from modelopt_spec.decoding.measure import pad_prompts
        from modelopt_spec.decoding.settings import neutral_config

        watched = _Watched(policy, self.clock)
        ids, mask = pad_prompts([list(prompt) for prompt in prompts])
        result = generate(
            self.model,
            ids,
            mask,
            generation_config=neutral_config(),
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_draft_tokens=self.num_draft_tokens,
            eos_token_id=list(self.eos_token_ids) or None,
            scheduler=watched,
            return_rounds=False,
        )
        end = self.clock()
        first = len(prompts)
        return end - (end if watched.started is None else watched.started), sum(map(len, result.outputs)) - first


def merge_measured(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report out of several of the same prompts, made at different times: medians over all of their repeats."""
    if not reports:
        raise DataError("no measured throughput to merge: measure at least once")
    merged = {key: reports[0][key] for key in ("kind", "version", "clock", "threads", "max_new_tokens")}
    for report in reports:
        for key, value in merged.items():
            if report[key] != value:
                raise DataError(f"measured throughput with {key} {value!r} and {report[key]!r} cannot be merged")
    prompts: dict[str, int] = {}
    points: dict[tuple[str, int], dict[str, Any]] = {}
    for report in reports:
        for load, count in report["prompts"].items():
            if prompts.setdefault(load, count) != count:
                raise DataError(f"load {load} was measured with {prompts[load]} and with {count} prompts")
        for point in report["points"]:
            mine = points.setdefault((point["policy"], point["load"]), {**point, "repeats": []})
            mine["repeats"] = [*mine["repeats"], *point["repeats"]]
            mine["throughput"] = float(np.median(mine["repeats"]))
    ordered = sorted(points.values(), key=lambda point: point["load"])
    repeats = max(len(point["repeats"]) for point in ordered)
    return merged | {"repeats": repeats, "prompts": prompts, "points": ordered}
