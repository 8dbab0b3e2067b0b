"""What rounds say about a drafter: accepted length, its distribution, acceptance by slot and by probability.

Everything is pooled by rounds: a file or prompt weighs as many rounds as it took, as in a server.

Legend: N rounds, m draft tokens of a full round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelopt_spec.decoding.rounds import RoundRecord

__all__ = ["PromptCounts", "count_prompts", "interval", "paired_interval", "round_statistics"]

PromptCounts = dict[int, tuple[int, int]]
"""Rounds and committed tokens of each prompt."""

_BINS = 10


def round_statistics(rounds: Sequence[RoundRecord], gamma: int) -> dict[str, Any]:
    """Statistics of some rounds of one drafter; ``gamma`` is m.

    Returns:
        ``rounds``; ``tau`` (tokens committed a round, bonus token included, cut at the end of an answer);
        ``tau_full`` (accepted + 1 over rounds that verified whole blocks: what cuts cannot touch);
        ``committed_histogram`` [m + 1] (rounds that committed 1, 2, ... tokens);
        ``conditional_acceptance`` [m] (share accepted at a slot, of the rounds that verified it and accepted all before
        it; None where no round did) over ``conditional_rounds`` [m]; ``draft_tokens``, ``verified_tokens`` and
        ``accepted_tokens``; and where the rounds carry probabilities ``accept_prob`` [m] (mean chance over the same
        rounds), ``tau_probability`` (accepted length that those chances make) and ``by_draft_probability`` (acceptance
        in ten bins of the draft's own probability).
    """
    accepted = np.array([r.accepted for r in rounds], dtype=np.int64)
    verified = np.array([r.verified for r in rounds], dtype=np.int64)
    committed = np.array([r.committed for r in rounds], dtype=np.int64)
    slots = np.arange(gamma)
    reached = (accepted[:, None] >= slots) & (verified[:, None] > slots)
    stood = accepted[:, None] > slots
    full = verified == gamma
    result: dict[str, Any] = {
        "rounds": len(rounds),
        "tau": float(committed.mean()) if len(rounds) else None,
        "tau_full": float(accepted[full].mean() + 1) if full.any() else None,
        "committed_histogram": [int((committed == count).sum()) for count in range(1, gamma + 2)],
        "conditional_acceptance": _shares((stood & reached).sum(0), reached.sum(0)),
        "conditional_rounds": reached.sum(0).tolist(),
        "draft_tokens": sum(len(r.drafted) for r in rounds),
        "verified_tokens": int(verified.sum()),
        "accepted_tokens": int(accepted.sum()),
    }
    if any(r.accept_prob is not None for r in rounds):
        chances = _padded([r.accept_prob for r in rounds], gamma)
        own = _padded([r.draft_prob for r in rounds], gamma)
        result |= _probabilities(chances, own, reached, stood)
    return result


def _shares(part: NDArray[Any], whole: NDArray[Any]) -> list[float | None]:
    return [float(a / b) if b else None for a, b in zip(part, whole, strict=True)]


def _padded(values: Sequence[tuple[float, ...] | None], width: int) -> NDArray[np.float64]:
    """[N, m], NaN where there is no value."""
    table = np.full((len(values), width), np.nan)
    for row, numbers in zip(table, values, strict=True):
        if numbers is not None:
            row[: len(numbers)] = numbers[:width]
    return table


def _probabilities(
    chances: NDArray[Any], own: NDArray[Any], reached: NDArray[Any], stood: NDArray[Any]
) -> dict[str, Any]:
    known = reached & ~np.isnan(chances)
    sums = np.where(known, chances, 0.0).sum(0)
    mean = _shares(sums, known.sum(0))
    # E[1 + a_0 + a_0 a_1 + ...] with the mean chance of each slot given that it is reached
    survival, length = 1.0, 1.0
    for chance in mean:
        survival *= chance or 0.0
        length += survival
    edges = np.clip((np.nan_to_num(own) * _BINS).astype(int), 0, _BINS - 1)
    bins = []
    for index in range(_BINS):
        inside = known & (edges == index)
        count = int(inside.sum())
        bins.append(
            {
                "low": index / _BINS,
                "high": (index + 1) / _BINS,
                "count": count,
                "draft_probability": float(own[inside].mean()) if count else None,
                "accepted": float(stood[inside].mean()) if count else None,
            }
        )
    return {"accept_prob": mean, "tau_probability": length, "by_draft_probability": bins}


def count_prompts(rounds: Sequence[RoundRecord]) -> PromptCounts:
    """Rounds and committed tokens by prompt."""
    totals: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for record in rounds:
        totals[record.prompt][0] += 1
        totals[record.prompt][1] += record.committed
    return {prompt: (count, tokens) for prompt, (count, tokens) in totals.items()}


def _resample(
    tables: Sequence[NDArray[Any]], measure: Callable[..., NDArray[Any]], replicates: int, seed: int, level: float
) -> tuple[float, float]:
    """Percentile interval of ``measure`` over prompts [P, 2] drawn with replacement, the same ones in every table."""
    generator, size = np.random.default_rng(seed), len(tables[0])
    drawn = generator.integers(size, size=(replicates, size))
    weights = np.zeros((replicates, size))
    np.add.at(weights, (np.arange(replicates)[:, None], drawn), 1.0)
    values = measure(*(weights @ table for table in tables))
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def interval(
    counts: Mapping[int, tuple[int, int]], *, replicates: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[float, float] | None:
    """Bootstrap interval of tau over prompts; None with fewer than two prompts."""
    if len(counts) < 2:
        return None
    table = np.array(list(counts.values()), dtype=np.float64)
    return _resample([table], lambda t: t[:, 1] / t[:, 0], replicates, seed, level)


def paired_interval(
    a: Mapping[int, tuple[int, int]],
    b: Mapping[int, tuple[int, int]],
    *,
    replicates: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float, float] | None:
    """Bootstrap interval of tau_b - tau_a over the prompts that both have; None with fewer than two."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 2:
        return None
    tables = [np.array([counts[prompt] for prompt in shared], dtype=np.float64) for counts in (a, b)]
    return _resample(tables, lambda s, t: t[:, 1] / t[:, 0] - s[:, 1] / s[:, 0], replicates, seed, level)
