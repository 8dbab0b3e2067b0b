"""Numbers of an evaluation, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from modelopt_spec.decoding.rounds import RoundRecord
from modelopt_spec.decoding.statistics import count_prompts, interval, paired_interval, round_statistics


def record(accepted: int, verified: int = 3, prompt: int = 0, committed: int | None = None, **values) -> RoundRecord:
    return RoundRecord(
        prompt=prompt,
        round=0,
        position=0,
        drafted=(1, 2, 3),
        verified=verified,
        accepted=accepted,
        committed=accepted + 1 if committed is None else committed,
        temperature=0.0,
        context_tokens=0,
        **values,
    )


ROUNDS = [record(3), record(0), record(1), record(2, verified=2), record(1, verified=1, committed=1)]


def test_accepted_length_and_its_distribution():
    got = round_statistics(ROUNDS, 3)
    assert got["rounds"] == 5
    assert got["tau"] == pytest.approx((4 + 1 + 2 + 3 + 1) / 5)
    assert got["tau_full"] == pytest.approx((3 + 0 + 1) / 3 + 1)
    assert got["committed_histogram"] == [2, 1, 1, 1]
    assert (got["draft_tokens"], got["verified_tokens"], got["accepted_tokens"]) == (15, 12, 7)


def test_conditional_acceptance_counts_only_rounds_that_got_there():
    got = round_statistics(ROUNDS, 3)
    # slot 0: all five verified it, four accepted; slot 1: three verified it behind an accepted slot 0; slot 2: one
    assert got["conditional_rounds"] == [5, 3, 1]
    assert got["conditional_acceptance"] == pytest.approx([4 / 5, 2 / 3, 1.0])
    nothing = round_statistics([record(0)], 3)
    assert nothing["conditional_acceptance"] == [0.0, None, None]


def test_acceptance_by_probability():
    rounds = [
        record(2, accept_prob=(0.9, 0.5, 0.1), draft_prob=(0.95, 0.55, 0.15)),
        record(0, accept_prob=(0.3, 0.9, 0.9), draft_prob=(0.52, 1.0, 0.2)),
    ]
    got = round_statistics(rounds, 3)
    assert got["accept_prob"] == pytest.approx([0.6, 0.5, 0.1])
    assert got["tau_probability"] == pytest.approx(1 + 0.6 + 0.6 * 0.5 + 0.6 * 0.5 * 0.1)
    bins = got["by_draft_probability"]
    assert [b["count"] for b in bins] == [0, 1, 0, 0, 0, 2, 0, 0, 0, 1]
    assert bins[5]["accepted"] == 0.5
    assert bins[5]["draft_probability"] == pytest.approx((0.55 + 0.52) / 2)
    assert bins[0]["accepted"] is None
    assert "accept_prob" not in round_statistics(ROUNDS, 3)


def test_no_round_at_all():
    got = round_statistics([], 3)
    assert got["tau"] is None
    assert got["conditional_acceptance"] == [None] * 3


def test_pooling_is_by_rounds_not_by_means():
    rounds = [record(3, prompt=0)] + [record(0, prompt=1)] * 9
    assert round_statistics(rounds, 3)["tau"] == pytest.approx(1.3)
    assert count_prompts(rounds) == {0: (1, 4), 1: (9, 9)}


def test_intervals_cover_and_pair():
    rng = np.random.default_rng(0)
    a = {p: (20, int(rng.binomial(60, 0.5)) + 20) for p in range(60)}
    b = {p: (20, tokens + 6) for p, (_, tokens) in a.items()}
    low, high = interval(a)
    tau = sum(t for _, t in a.values()) / sum(r for r, _ in a.values())
    assert low < tau < high
    assert high - low < 0.2
    low, high = paired_interval(a, b)
    assert low == pytest.approx(0.3)
    assert high == pytest.approx(0.3)
    noisy = {p: (20, int(rng.binomial(60, 0.5)) + 20) for p in range(60)}
    low, high = paired_interval(a, noisy)
    assert low < 0 < high
    assert interval({0: (3, 4)}) is None
    assert paired_interval(a, {0: (1, 1), 99: (1, 1)}) is None
