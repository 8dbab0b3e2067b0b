"""The vectorised scheduler against the walk of the paper, and the properties that the paper promises."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_spec.errors import DataError
from modelopt_spec.scheduling.cost import AdditiveCostTable, CostTable
from modelopt_spec.scheduling.prefix_scheduler import (
    allocate,
    check_survival,
    early_stop_budget,
    global_budget,
    schedulable,
    uniform_budget,
)
from modelopt_spec.scheduling.prefix_scheduler_reference import (
    candidates,
    early_stop_reference,
    global_argmax_reference,
)

confidence = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.5, 0.9, 1.0]))


@st.composite
def survivals(draw, most_requests=5, most_slots=5):
    requests = draw(st.integers(1, most_requests))
    slots = draw(st.integers(1, most_slots))
    row = st.lists(confidence, min_size=slots, max_size=slots)
    rows = draw(st.lists(row, min_size=requests, max_size=requests))
    return np.cumprod(np.array(rows), axis=1)


@st.composite
def staircases(draw):
    """Steps per second that fall in cliffs at a few token counts."""
    knots = sorted(draw(st.sets(st.integers(1, 30), min_size=1, max_size=6)))
    drops = draw(st.lists(st.floats(0.3, 1.0), min_size=len(knots), max_size=len(knots)))
    return CostTable(tuple(knots), tuple(np.cumprod(drops).tolist()))


smooth = st.builds(
    lambda bias, slope: AdditiveCostTable(bias, (1,), (0.0,), (1, 100), (0.0, 99 * slope)),
    st.floats(0.01, 5.0),
    st.floats(0.0, 1.0),
)


def sps_of(cost):
    return lambda tokens: float(cost.steps_per_second(1, tokens))


@settings(max_examples=300)
@given(survivals(), st.one_of(staircases(), smooth), st.sampled_from([0.0, 1e-6, 0.4]), st.integers(1, 40))
def test_vectorised_equals_the_walk(a, cost, floor, most):
    for limit in (None, most):
        for plain, fast in ((early_stop_reference, early_stop_budget), (global_argmax_reference, global_budget)):
            want = plain(a.tolist(), sps_of(cost), floor=floor, max_batch_tokens=limit)
            kept = schedulable(a, floor=floor)
            budget = fast(kept, cost, max_batch_tokens=limit)
            assert allocate(kept, budget.draft_tokens).tolist() == list(want.lengths)
            assert (budget.theta, budget.tau, budget.batch_tokens) == (want.theta, want.tau, want.batch_tokens)
            assert budget.stopped_after == want.stopped_after


@given(survivals(), st.integers(0, 30))
def test_allocation_is_a_prefix_within_budget_and_the_best(a, budget):
    lengths = allocate(a, budget)
    ranked = candidates(a.tolist())
    admitted = {(r, j) for r, j, _ in ranked[:budget]}
    assert lengths.sum() == min(budget, len(ranked))
    assert admitted == {(r, j) for r, n in enumerate(lengths) for j in range(1, n + 1)}


@given(survivals(), st.lists(st.integers(0, 5), min_size=5, max_size=5), st.integers(0, 30))
def test_capacities_are_kept(a, capacity, budget):
    limit = np.array(capacity[: len(a)])
    assert (allocate(schedulable(a, capacity=limit), budget) <= limit).all()


@given(survivals(), staircases(), st.integers(1, 20))
def test_batch_limit_is_kept(a, cost, limit):
    for fast in (early_stop_budget, global_budget):
        assert fast(a, cost, max_batch_tokens=limit).batch_tokens <= max(limit, len(a))


@given(survivals(), smooth)
def test_early_stop_is_global_where_theta_has_one_peak(a, cost):
    """Tau is concave and T linear, so Theta rises and then falls."""
    best, first = global_budget(a, cost), early_stop_budget(a, cost)
    assert first.theta >= best.theta * (1.0 - 1e-12)


@given(survivals(), staircases())
def test_global_is_never_below_early_stop(a, cost):
    assert global_budget(a, cost).theta >= early_stop_budget(a, cost).theta


def test_global_crosses_a_cliff_that_stops_the_other():
    cost = CostTable((1, 5, 9), (1.0, 0.82, 0.69))
    a = np.cumprod(np.full((4, 3), 0.95), axis=1)
    stopped, best = early_stop_budget(a, cost), global_budget(a, cost)
    assert stopped.draft_tokens < best.draft_tokens
    assert best.theta > 1.2 * stopped.theta


@settings(max_examples=60)
@given(survivals(most_requests=3, most_slots=3), st.one_of(staircases(), smooth))
def test_global_is_the_best_of_all_lengths(a, cost):
    requests, slots = a.shape
    best = 0.0
    for lengths in itertools.product(range(slots + 1), repeat=requests):
        tau = requests + sum(float(a[r, :n].sum()) for r, n in enumerate(lengths))
        best = max(best, tau * sps_of(cost)(requests + sum(lengths)))
    assert global_budget(a, cost).theta == pytest.approx(best, rel=1e-12)


def test_ties_go_to_the_earlier_slot_then_to_the_earlier_request():
    a = np.ones((3, 4))
    assert [allocate(a, n).tolist() for n in (1, 3, 4, 8)] == [[1, 0, 0], [1, 1, 1], [2, 1, 1], [3, 3, 2]]


@given(survivals(), st.integers(0, 25), st.randoms(use_true_random=False))
def test_renaming_requests_moves_lengths_along_but_for_ties(a, budget, random):
    """Only survivals decide: permuting the requests permutes the multiset of (request survivals, length)."""
    order = list(range(len(a)))
    random.shuffle(order)
    here, there = allocate(a, budget), allocate(a[order], budget)
    gain = [a[r, :n].sum() for r, n in enumerate(here)]
    assert sum(gain) == pytest.approx(sum(a[order][r, :n].sum() for r, n in enumerate(there)), abs=1e-12)


@given(survivals(), st.one_of(staircases(), smooth))
def test_uniform_length_is_the_best_single_length(a, cost):
    length, budget = uniform_budget(a, cost)
    requests, slots = a.shape
    scores = [(requests + a[:, :n].sum()) * sps_of(cost)(requests * (1 + n)) for n in range(slots + 1)]
    assert scores[length] == pytest.approx(max(scores), rel=1e-12)
    assert budget.batch_tokens == requests * (1 + length)


def test_no_requests():
    empty = np.zeros((0, 4))
    cost = CostTable((1,), (1.0,))
    assert early_stop_budget(empty, cost).draft_tokens == global_budget(empty, cost).draft_tokens == 0
    assert uniform_budget(empty, cost)[0] == 0
    assert allocate(empty, 3).shape == (0,)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[0.5, 0.6]], "rises along its slots"),
        ([[1.5, 0.6]], "must be a probability"),
        ([[0.5, float("nan")]], "request 0, slot 1 is nan"),
        ([0.5], r"\[requests, slots\]"),
    ],
)
def test_survivals_are_checked(bad, message):
    with pytest.raises(DataError, match=message):
        check_survival(np.array(bad))
    assert check_survival(np.array([[0.5, 0.5], [1.0, 0.0]])).shape == (2, 2)
