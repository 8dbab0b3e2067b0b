"""What the serving simulation serves: requests that arrive over time and accept draft tokens as recorded rounds did.

Legend: N recorded rounds, G slots of a block (gamma), Q requests, P prompts.

The acceptance process of a request is the sequence of full-block rounds of one recorded prompt: each verification round
consumes the next one, and the sequence starts over at its end (``sequential``), or each round is drawn at random from
all recorded ones (``bootstrap``). Both keep each round's confidences together with its accepted prefix. A round whose
block accepts n draft tokens commits ``min(n, verified) + 1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.rounds import RoundTable

__all__ = ["AcceptanceProcess", "Workload", "closed_loop", "one_batch", "open_loop"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class AcceptanceProcess:
    """Recorded rounds, arranged so that a step of many requests is a few array look-ups."""

    gamma: int
    accepted: IntArray
    """[N] draft tokens that the full block accepts."""
    confidence_logits: FloatArray | None
    """[N, G]"""
    next_row: IntArray
    """[N] the prompt's next round; after its last round its first."""
    first_row: IntArray
    """[P] first round of each prompt."""
    output_tokens: IntArray
    """[P] tokens that the recorded output had."""
    context_tokens: IntArray
    """[P] context before the first round."""
    kind: Literal["sequential", "bootstrap"] = "sequential"
    seed: int = 0

    @classmethod
    def from_rounds(
        cls, table: RoundTable, kind: Literal["sequential", "bootstrap"] = "sequential", seed: int = 0
    ) -> AcceptanceProcess:
        """Use the full-block rounds of ``table``; DataError when a prompt has none left or there are none at all."""
        if kind not in ("sequential", "bootstrap"):
            raise ConfigError(f"acceptance process is {kind!r}: it is 'sequential' or 'bootstrap'")
        full = table.full_blocks()
        if not len(full):
            raise DataError(
                f"none of {len(table)} rounds verified a full block of {table.gamma} draft tokens: the acceptance of "
                "longer prefixes is unknown. Record rounds without a scheduler"
            )
        prompts, first = np.unique(full.prompt, return_index=True)
        last = np.append(first[1:], len(full)) - 1
        following = np.arange(1, len(full) + 1)
        following[last] = first
        logits = full.confidence_logits
        if logits is not None and np.isnan(logits).any():
            raise DataError("some rounds have confidences and others have none: record them with one drafter")
        committed = np.array([int(table.committed[table.prompt == prompt].sum()) for prompt in prompts])
        return cls(
            gamma=table.gamma,
            accepted=full.accepted,
            confidence_logits=logits,
            next_row=following,
            first_row=first.astype(np.int64),
            output_tokens=committed,
            context_tokens=full.context_tokens[first],
            kind=kind,
            seed=seed,
        )

    def advance(self, rows: IntArray, requests: IntArray, steps: IntArray) -> IntArray:
        """Round that follows for each running request: rows [R], request numbers [R], rounds done so far [R] -> [R]."""
        if self.kind == "sequential":
            return self.next_row[rows]
        return self.draw(requests, steps)

    def draw(self, requests: IntArray, steps: IntArray) -> IntArray:
        """Random round for (request, step): a hash, so that any order of evaluation gives the same draws."""
        with np.errstate(over="ignore"):
            x = requests.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + steps.astype(np.uint64)
            x += np.uint64(self.seed) * np.uint64(0xD1B54A32D192ED03)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
        return (x % np.uint64(len(self.accepted))).astype(np.int64)


@dataclass(frozen=True)
class Workload:
    """Q requests in order of arrival."""

    arrival: FloatArray
    """[Q] seconds, ascending."""
    first_row: IntArray
    """[Q] round that each request starts with."""
    output_tokens: IntArray
    """[Q] tokens that each request generates."""
    context_tokens: IntArray
    """[Q] tokens in the context before the first round."""

    def __len__(self) -> int:
        return len(self.arrival)


def _requests(process: AcceptanceProcess, count: int, output_tokens: int | None, seed: int, arrival: Any) -> Workload:
    if count < 1:
        raise ConfigError(f"requests is {count}: simulate at least one")
    if output_tokens is not None and output_tokens < 1:
        raise ConfigError(f"output_tokens is {output_tokens}: a request generates at least one token")
    prompts = np.random.default_rng(seed).integers(0, len(process.first_row), count)
    first = process.first_row[prompts]
    if process.kind == "bootstrap":
        first = process.draw(np.arange(count), np.zeros(count, dtype=np.int64))
    length = process.output_tokens[prompts] if output_tokens is None else np.full(count, output_tokens)
    return Workload(np.asarray(arrival, dtype=np.float64), first, length, process.context_tokens[prompts])


def closed_loop(
    process: AcceptanceProcess, *, requests: int, output_tokens: int | None = None, seed: int = 0
) -> Workload:
    """All requests wait from the start: with a limit of C running ones, the load is C concurrent requests.

    Args:
        process: recorded rounds; each request replays a prompt drawn at random.
        requests: how many in all. Several times the concurrency gives a steady state.
        output_tokens: length of each output; default the recorded one.
        seed: of the drawn prompts.
    """
    return _requests(process, requests, output_tokens, seed, np.zeros(requests))


def one_batch(process: AcceptanceProcess, prompts: IntArray, *, output_tokens: int | None = None) -> Workload:
    """These recorded prompts (by their order), all at once."""
    length = process.output_tokens[prompts] if output_tokens is None else np.full(len(prompts), output_tokens)
    first = process.first_row[prompts]
    if process.kind == "bootstrap":
        first = process.draw(prompts, np.zeros(len(prompts), dtype=np.int64))
    return Workload(np.zeros(len(prompts)), first, length, process.context_tokens[prompts])


def open_loop(
    process: AcceptanceProcess, *, requests: int, rate: float, output_tokens: int | None = None, seed: int = 0
) -> Workload:
    """Poisson arrivals of ``rate`` requests a second; the other arguments as in :func:`closed_loop`."""
    if not rate > 0:
        raise ConfigError(f"rate is {rate}: requests a second must be positive")
    gaps = np.random.default_rng(seed + 1).exponential(1.0 / rate, requests)
    return _requests(process, requests, output_tokens, seed, np.cumsum(gaps))
