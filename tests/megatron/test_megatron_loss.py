"""The vocabulary-parallel loss: golden values at TP2, and no tensor of slots x V on any rank."""

from __future__ import annotations

import pytest
from megatron_workers import WorkerPool

pytestmark = pytest.mark.megatron

VOCAB = 3001


@pytest.mark.parametrize(("tp", "through_module"), [(1, False), (2, False), (1, True), (2, True)])
def test_the_golden_case_holds(pool: WorkerPool, tp: int, through_module: bool) -> None:
    for differences in pool.run("jobs_loss:golden", tp, tp=tp, through_module=through_module):
        assert len(differences) > 30
        assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("mode", ["vanilla", "gru", "none"])
def test_no_rank_holds_slots_times_vocabulary(pool: WorkerPool, mode: str) -> None:
    for seen in pool.run("jobs_loss:memory", 2, tp=2, vocab=VOCAB, mode=mode):
        assert seen["slots"] > 50
        assert seen["widest"] < VOCAB, seen
        assert seen["elements"][0] < seen["slots"] * VOCAB, seen


def test_the_detector_sees_what_one_rank_holds(pool: WorkerPool) -> None:
    (seen,) = pool.run("jobs_loss:memory", 1, tp=1, vocab=VOCAB, mode="vanilla")
    assert seen["widest"] >= VOCAB
    assert seen["elements"][0] >= seen["slots"] * VOCAB
