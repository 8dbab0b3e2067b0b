"""Which schedulers keep the target's distribution: proved by enumeration, in exact fractions."""

import random
from fractions import Fraction

import pytest

from modelopt_spec.scheduling.calibration import survival
from modelopt_spec.scheduling.cost import CostTable
from modelopt_spec.scheduling.policies import FixedLength, PrefixScheduler, StaticThreshold
from modelopt_spec.scheduling.prefix_scheduler import allocate, early_stop_budget, global_budget
from tests.scheduling.enumeration import Enumerator

A, B = 0, 1


def tenths(*values):
    return tuple(Fraction(v, 10) for v in values)


def appendix_target(request, prefix):
    """First token (0.7, 0.3); after A a draft that is accepted with 0.9, after B one that never is."""
    if not prefix:
        return tenths(7, 3)
    return tenths(9, 1) if prefix[0] == A else tenths(10, 0)


def appendix_draft(request, prefix):
    if not prefix:
        return tenths(5, 5)
    return tenths(10, 0) if prefix[0] == A else tenths(0, 10)


APPENDIX_COST = CostTable.dense([0.0, 1.0, 0.5, 0.45])


def naive_global(cost):
    """The scheduler that the paper warns of: the global search on the confidences of the step itself."""

    def decide(history):
        a = survival(history[-1])
        return allocate(a, global_budget(a, cost).draft_tokens).tolist()

    return decide


def early_stop(cost):
    def decide(history):
        a = survival(history[-1])
        return allocate(a, early_stop_budget(a, cost).draft_tokens).tolist()

    return decide


def policy(make):
    """Lengths of a policy object that has lived through all steps."""

    def decide(history):
        here = make()
        for logits in history:
            lengths = here.lengths(logits)
        return lengths.tolist()

    return decide


def first_token(enumerator, decide):
    outputs = enumerator.outputs(decide, steps=1, length=1)
    return [outputs[((token,),)] for token in (A, B)]


def test_appendix_a_exactly():
    """The naive global search emits A with 0.85 where the target says 0.70; early stop keeps it."""
    enumerator = Enumerator(appendix_target, appendix_draft, requests=1, gamma=2)
    assert first_token(enumerator, naive_global(APPENDIX_COST)) == [Fraction(85, 100), Fraction(15, 100)]
    assert first_token(enumerator, early_stop(APPENDIX_COST)) == [Fraction(70, 100), Fraction(30, 100)]
    stale = policy(lambda: PrefixScheduler(APPENDIX_COST, 2))
    assert first_token(enumerator, stale) == [Fraction(70, 100), Fraction(30, 100)]


def random_model(seed, spread):
    """Distributions over two tokens in sixteenths, different after each prefix."""

    def model(request, prefix):
        rng = random.Random(f"{seed}.{request}.{prefix}")
        value = 8 + rng.randint(-spread, spread)
        return (Fraction(value, 16), Fraction(16 - value, 16))

    return model


def by_time(*seconds):
    return CostTable(tuple(range(1, len(seconds) + 1)), tuple(1.0 / t for t in seconds))


STAIRS = by_time(1.0, 1.1, 1.15, 1.75, 1.95, 2.0)
SLOPE = by_time(1.0, 1.2, 1.25, 1.55, 1.75, 1.85)
RAMP = by_time(1.0, 1.4, 2.0, 2.6, 3.2, 3.4)
CASES = {"stairs": (STAIRS, 2), "slope": (SLOPE, 8), "ramp": (RAMP, 2)}
"""Cost tables and models (by seed) for which the length that looks best depends on the tokens that were drafted."""

KEEP = {
    "early_stop": lambda cost: PrefixScheduler(cost, 2, method="early_stop"),
    "stale, ranked now": lambda cost: PrefixScheduler(cost, 2, delay=1),
    "stale, ranked then": lambda cost: PrefixScheduler(cost, 2, delay=1, allocation="stale"),
    "stale by two steps": lambda cost: PrefixScheduler(cost, 2),
    "padded": lambda cost: PrefixScheduler(cost, 2, delay=1, padded=True),
    "calibrated, with limits": lambda cost: PrefixScheduler(
        cost, 2, delay=1, temperatures=[0.4, 3.0], survival_floor=0.3, max_batch_tokens=5
    ),
    "threshold": lambda cost: StaticThreshold(2, 0.7),
    "fixed": lambda cost: FixedLength(2, 1),
}


def two_requests(seed):
    return Enumerator(random_model(seed, 8), random_model(seed + 100, 8), requests=2, gamma=2)


@pytest.mark.parametrize("name", KEEP)
@pytest.mark.parametrize("case", CASES)
def test_two_requests_keep_the_joint_distribution(name, case):
    """Two requests that compete for one budget over two steps: their outputs stay independent and exact."""
    cost, seed = CASES[case]
    enumerator = two_requests(seed)
    assert enumerator.outputs(policy(lambda: KEEP[name](cost)), steps=2, length=2) == enumerator.wanted(2)


@pytest.mark.parametrize("name", KEEP)
def test_three_steps_keep_the_distribution(name):
    """One request for as many steps as the longest delay needs to matter."""
    enumerator = Enumerator(random_model(5, 7), random_model(6, 7), requests=1, gamma=2)
    assert enumerator.outputs(policy(lambda: KEEP[name](SLOPE)), steps=3, length=4) == enumerator.wanted(4)


@pytest.mark.parametrize("case", ["stairs", "ramp"])
def test_the_naive_global_search_changes_the_distribution(case):
    """The same enumeration sees the fault, so the proofs above could fail."""
    cost, seed = CASES[case]
    enumerator = two_requests(seed)
    assert enumerator.outputs(naive_global(cost), steps=1, length=2) != enumerator.wanted(2)


@pytest.mark.parametrize("name", ["early_stop", "stale, ranked now", "calibrated, with limits", "threshold"])
def test_the_schedulers_of_the_proofs_vary_their_lengths(name):
    seen = set()

    def spy(history, cost):
        lengths = policy(lambda: KEEP[name](cost))(history)
        seen.add(tuple(lengths))
        return lengths

    for cost, seed in CASES.values():
        two_requests(seed).outputs(lambda history, cost=cost: spy(history, cost), steps=2, length=1)
    assert len(seen) > 2
