"""Rounds from llama.cpp's timings, against a simulation of how its server counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelopt_spec.checkpoints.engines.llama_cpp_timings import Generation, rounds_from_timings, tau_from_timings
from modelopt_spec.errors import SpecError

EOS = 2


@dataclass(frozen=True)
class Served:
    generation: Generation
    rounds: int
    """Verified rounds and plain steps behind the first token."""


def serve(accepts: list[int], eos_at: int, limit: int, num_draft_tokens: int) -> Served:
    """Play the server: round i accepts ``accepts[i]`` drafts if that many were made; token ``eos_at`` ends the text."""
    truth = [EOS if i == eos_at else 7 for i in range(limit + num_draft_tokens + 1)]
    tokens, draft_n, accepted_n, verified, plain = [truth[0]], 0, 0, 0, 0
    while len(tokens) < limit and EOS not in tokens:
        drafts = min(num_draft_tokens, limit - len(tokens) - 1)
        if drafts == 0:
            tokens.append(truth[len(tokens)])
            plain += 1
            continue
        accepted = min(accepts[(verified + plain) % len(accepts)], drafts)
        draft_n, accepted_n, verified = draft_n + drafts, accepted_n + accepted, verified + 1
        for token in truth[len(tokens) : len(tokens) + accepted + 1]:
            tokens.append(token)
            if token == EOS:
                break
    stopped = EOS in tokens
    generation = Generation(tuple(tokens), stopped, limit, draft_n, accepted_n, 1.0, 1.0, verified)
    return Served(generation, verified + plain)


@given(
    accepts=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    eos_at=st.integers(0, 60),
    limit=st.integers(1, 50),
    num_draft_tokens=st.integers(1, 7),
)
def test_rounds_are_those_that_the_server_ran(
    accepts: list[int], eos_at: int, limit: int, num_draft_tokens: int
) -> None:
    served = serve(accepts, eos_at, limit, num_draft_tokens)
    assert rounds_from_timings(served.generation, num_draft_tokens) == served.rounds
    alone = replace(served.generation, verified_rounds=None)
    length = len(alone.tokens)
    if alone.stopped_at_eos and limit - num_draft_tokens < length < limit:
        with pytest.raises(SpecError, match="cannot be told from draft_n; allow at least"):
            rounds_from_timings(alone, num_draft_tokens)
    else:
        assert rounds_from_timings(alone, num_draft_tokens) == served.rounds


def test_dividing_draft_n_by_k_would_be_wrong() -> None:
    served = serve([7], eos_at=99, limit=12, num_draft_tokens=7)
    # first token, a full round of 8, then a round that may draft only two
    assert (served.generation.draft_n, served.generation.draft_n_accepted, served.rounds) == (9, 9, 2)
    assert tau_from_timings([served.generation], 7).tau == 11 / 2


def test_drafts_behind_the_end_of_text_do_not_count() -> None:
    served = serve([7], eos_at=3, limit=40, num_draft_tokens=7)
    assert served.generation.draft_n_accepted == 7
    assert len(served.generation.tokens) == 4
    assert tau_from_timings([served.generation], 7).tau == 3.0


def test_tau_pools_rounds_over_answers() -> None:
    slow, fast = serve([0], 99, 11, 7), serve([7], 99, 17, 7)
    pooled = tau_from_timings([slow.generation, fast.generation], 7)
    assert (pooled.committed, pooled.rounds) == (10 + 16, 10 + 2)
    assert pooled.tau == 26 / 12


def test_numbers_that_contradict_are_refused() -> None:
    served = serve([3], eos_at=20, limit=60, num_draft_tokens=7).generation
    with pytest.raises(SpecError, match="no multiple of K=4"):
        rounds_from_timings(served, 4)
    with pytest.raises(SpecError, match="timings contradict"):
        rounds_from_timings(replace(served, stopped_at_eos=False, draft_n_accepted=100), 7)
    with pytest.raises(SpecError, match="no round to measure"):
        tau_from_timings([serve([0], 99, 1, 7).generation], 7)
