import numpy as np
import pytest
import torch

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.calibration import survival
from modelopt_spec.scheduling.cost import CostTable
from modelopt_spec.scheduling.policies import FixedLength, NoSpeculation, PrefixScheduler, StaticThreshold
from modelopt_spec.scheduling.prefix_scheduler import allocate, early_stop_budget, global_budget, uniform_budget

GAMMA = 3
COST = CostTable((1, 5, 9, 13), (1.0, 0.8, 0.5, 0.3))


def logits(rows, seed):
    return np.random.default_rng(seed).normal(0.5, 1.5, (rows, GAMMA))


def test_plain_policies():
    z = np.array([[3.0, 3.0, -3.0], [-3.0, 3.0, 3.0]])
    assert NoSpeculation(GAMMA).lengths(z).tolist() == [0, 0]
    assert FixedLength(GAMMA).lengths(z).tolist() == [3, 3]
    assert FixedLength(GAMMA, 2).lengths(z, capacity=[1, 9]).tolist() == [1, 2]
    assert StaticThreshold(GAMMA, 0.5, on="confidence").lengths(z).tolist() == [2, 0]
    assert StaticThreshold(GAMMA, 0.92).lengths(z).tolist() == [1, 0]
    assert StaticThreshold(GAMMA, 0.92, (100.0, 1.0, 1.0)).lengths(z).tolist() == [0, 0]
    assert FixedLength(GAMMA).lengths(None, capacity=[3, 2]).tolist() == [3, 2]
    assert StaticThreshold(GAMMA, 0.9).lengths(None, capacity=[3, 2]).tolist() == [3, 2]


def test_tensors_give_tensors():
    z = torch.randn(4, GAMMA)
    for policy in (FixedLength(GAMMA), StaticThreshold(GAMMA, 0.4), PrefixScheduler(COST, GAMMA), NoSpeculation(GAMMA)):
        lengths = policy.lengths(z, capacity=torch.tensor([3, 3, 1, 0]))
        assert isinstance(lengths, torch.Tensor)
        assert lengths.dtype == torch.int64
        assert lengths.shape == (4,)
    half = StaticThreshold(GAMMA, 0.4).lengths(z.to(torch.bfloat16))
    assert half.shape == (4,)


def test_early_stop_uses_this_steps_temperatures_and_nothing_else():
    temperatures = [0.5, 1.5, 3.0]
    scheduler = PrefixScheduler(COST, GAMMA, method="early_stop", temperatures=temperatures)
    for seed in range(5):
        z = logits(4, seed)
        a = survival(z, temperatures)
        assert scheduler.lengths(z).tolist() == allocate(a, early_stop_budget(a, COST).draft_tokens).tolist()


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_budget_comes_from_confidences_of_delay_steps_ago(delay):
    scheduler = PrefixScheduler(COST, GAMMA, delay=delay)
    steps = [logits(4, seed) for seed in range(6)]
    for t, z in enumerate(steps):
        lengths = scheduler.lengths(z)
        old = survival(steps[t - delay]) if t >= delay else np.ones((4, GAMMA))
        assert scheduler.last_budget == global_budget(old, COST)
        assert lengths.tolist() == allocate(survival(z), scheduler.last_budget.draft_tokens).tolist()


def test_stale_allocation_shares_out_by_old_survivals():
    scheduler = PrefixScheduler(COST, GAMMA, allocation="stale", delay=1)
    first, second = logits(4, 0), logits(4, 1)
    scheduler.lengths(first)
    old = survival(first)
    assert scheduler.lengths(second).tolist() == allocate(old, global_budget(old, COST).draft_tokens).tolist()


def test_padded_gives_one_length_from_old_confidences():
    scheduler = PrefixScheduler(COST, GAMMA, padded=True, delay=1)
    first, second = logits(4, 0), logits(4, 1)
    scheduler.lengths(first)
    length, _ = uniform_budget(survival(first), COST)
    assert scheduler.lengths(second, capacity=[3, 3, 3, 1]).tolist() == [min(length, c) for c in (3, 3, 3, 1)]


def test_history_follows_names_through_reordering_and_departures():
    scheduler = PrefixScheduler(COST, GAMMA, delay=1)
    z = logits(3, 0)
    scheduler.lengths(z, request_ids=["a", "b", "c"])
    scheduler.finish(["b"])
    scheduler.lengths(logits(3, 1), request_ids=["c", "new", "a"])
    old = np.stack([survival(z[2]), np.ones(GAMMA), survival(z[0])])
    assert scheduler.last_budget == global_budget(old, COST)


def test_a_name_that_returns_starts_without_history():
    scheduler = PrefixScheduler(COST, GAMMA, delay=1)
    scheduler.lengths(logits(1, 0), request_ids=["a"])
    scheduler.finish(["a", "never seen"])
    scheduler.lengths(logits(1, 1), request_ids=["a"])
    assert scheduler.last_budget == global_budget(np.ones((1, GAMMA)), COST)
    scheduler.reset()
    scheduler.lengths(logits(1, 2), request_ids=["a"])
    assert scheduler.last_budget == global_budget(np.ones((1, GAMMA)), COST)


def test_many_requests_come_and_go():
    scheduler = PrefixScheduler(COST, GAMMA, delay=1)
    for step in range(5):
        ids = list(range(step * 100, step * 100 + 150))
        assert scheduler.lengths(logits(150, step), request_ids=ids).shape == (150,)
        scheduler.finish(ids[:100])
    assert len(scheduler._history._row) == 50


def test_a_request_without_confidence_counts_as_certain_or_as_the_prior():
    z = logits(3, 0)
    z[1] = np.inf
    a = survival(z)
    assert (a[1] == 1.0).all()
    early = PrefixScheduler(COST, GAMMA, method="early_stop")
    assert early.lengths(z).tolist() == allocate(a, early_stop_budget(a, COST).draft_tokens).tolist()
    prior = [0.4, 0.3, 0.2]
    a[1] = np.cumprod(prior)
    careful = PrefixScheduler(COST, GAMMA, method="early_stop", prior=prior)
    assert careful.lengths(z).tolist() == allocate(a, early_stop_budget(a, COST).draft_tokens).tolist()
    no_head = PrefixScheduler(COST, GAMMA)
    flat = np.ones((2, GAMMA))
    flat[1, 2] = 0.0
    assert (
        no_head.lengths(None, capacity=[3, 2]).tolist()
        == allocate(flat, global_budget(flat, COST).draft_tokens).tolist()
    )


def test_survival_floor_and_batch_limit():
    z = np.array([[2.0, -2.0, 2.0]])
    flat = CostTable((1,), (1.0,))
    assert PrefixScheduler(flat, GAMMA).lengths(z).tolist() == [3]
    assert PrefixScheduler(flat, GAMMA, survival_floor=0.2, method="early_stop").lengths(z).tolist() == [1]
    assert PrefixScheduler(flat, GAMMA, max_batch_tokens=3).lengths(z).tolist() == [2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 0}, "gamma is 0"),
        ({"temperatures": [1.0, -2.0, 1.0]}, "positive and finite"),
        ({"temperatures": [1.0]}, "1 entries"),
        ({"method": "greedy"}, "method is 'greedy'"),
        ({"allocation": "old"}, "allocation is 'old'"),
        ({"delay": 0}, "changes the output distribution"),
        ({"padded": True, "method": "early_stop"}, "padded needs"),
        ({"survival_floor": 1.0}, r"survival_floor is 1\.0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens is 0"),
        ({"prior": [0.5, 0.5, 1.5]}, "prior"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PrefixScheduler(COST, **({"gamma": GAMMA} | settings))


def test_bad_steps_are_refused():
    scheduler = PrefixScheduler(COST, GAMMA)
    with pytest.raises(DataError, match=r"shape \(2, 5\).*\[requests, 3\]"):
        scheduler.lengths(np.zeros((2, 5)))
    with pytest.raises(DataError, match="request 1, slot 2 is NaN"):
        scheduler.lengths(np.array([[0.0, 0.0, 0.0], [0.0, 0.0, np.nan]]))
    with pytest.raises(DataError, match="both None"):
        scheduler.lengths(None)
    with pytest.raises(DataError, match="capacity has shape"):
        scheduler.lengths(np.zeros((2, GAMMA)), capacity=[1])
    with pytest.raises(DataError, match="2 request_ids for 3"):
        scheduler.lengths(np.zeros((3, GAMMA)), request_ids=["a", "b"])
    with pytest.raises(DataError, match="holds a name twice"):
        scheduler.lengths(np.zeros((2, GAMMA)), request_ids=["a", "a"])
    with pytest.raises(ConfigError, match="length is 4"):
        FixedLength(GAMMA, 4)
    with pytest.raises(ConfigError, match="threshold is 2"):
        StaticThreshold(GAMMA, 2.0)
    with pytest.raises(ConfigError, match="on is 'logit'"):
        StaticThreshold(GAMMA, 0.5, on="logit")
