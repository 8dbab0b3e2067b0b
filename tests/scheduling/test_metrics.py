import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelopt_spec.errors import ConfigError
from modelopt_spec.scheduling.metrics import Binning, auc, brier, ece, ece_grid, ece_noise_floor, reliability_bins


def plain_ece(p, y, bins):
    total = 0.0
    for b in range(bins):
        inside = [i for i in range(len(p)) if min(int(p[i] * bins), bins - 1) == b]
        if inside:
            total += len(inside) / len(p) * abs(np.mean([p[i] for i in inside]) - np.mean([y[i] for i in inside]))
    return total


samples = st.lists(st.tuples(st.floats(0.001, 0.999), st.booleans()), min_size=1, max_size=60)


@given(samples, st.integers(1, 20))
def test_ece_is_the_definition(rows, bins):
    p, y = (np.array(column, dtype=float) for column in zip(*rows))
    assert ece(p, y, Binning(bins)) == pytest.approx(plain_ece(p, y, bins), abs=1e-12)
    assert ece_grid(np.stack([p, p]), y, Binning(bins)) == pytest.approx([ece(p, y, Binning(bins))] * 2, abs=1e-12)


@given(samples, st.integers(1, 8), st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_weights_count_rounds(rows, bins, counts):
    """A weight of n is the same as n copies, for both binnings."""
    p, y = (np.array(column, dtype=float) for column in zip(*rows))
    weight = np.array(counts[: len(p)], dtype=float)
    if not weight.sum():
        return
    repeated = weight.astype(int)
    for binning in (Binning(bins), Binning(bins, adaptive=True)):
        expected = ece(np.repeat(p, repeated), np.repeat(y, repeated), binning)
        assert ece(p, y, binning, weight) == pytest.approx(expected, abs=1e-9)


def test_adaptive_bins_hold_equal_counts_and_keep_ties_together():
    p = np.linspace(0.9, 0.99, 100)
    counts = np.bincount(Binning(5, adaptive=True).assign(p), minlength=5)
    assert counts.tolist() == [20, 20, 20, 20, 20]
    assert len(set(Binning(5, adaptive=True).assign(np.full(30, 0.7)))) == 1


def test_auc_is_the_pairwise_rate():
    rng = np.random.default_rng(0)
    p, y = rng.integers(0, 5, 40) / 5.0, rng.integers(0, 2, 40)
    pairs = [(a > b) + 0.5 * (a == b) for a in p[y == 1] for b in p[y == 0]]
    assert auc(p, y) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert auc(p, np.ones(40)) is None


def test_brier_and_reliability_bins():
    p, y = np.array([0.1, 0.1, 0.9]), np.array([0, 1, 1])
    assert brier(p, y) == pytest.approx((0.01 + 0.81 + 0.01) / 3)
    bins = reliability_bins(p, y, Binning(2))
    assert [b["count"] for b in bins] == [2, 1]
    assert bins[0]["predicted"] == pytest.approx(0.1)
    assert bins[0]["observed"] == pytest.approx(0.5)


def test_noise_floor_predicts_the_ece_of_perfect_predictions():
    rng = np.random.default_rng(1)
    p = rng.random(2000)
    binning = Binning(15)
    seen = np.mean([ece(p, rng.random(2000) < p, binning) for _ in range(200)])
    assert ece_noise_floor(p, binning) == pytest.approx(seen, rel=0.1)


def test_no_bins_is_an_error():
    with pytest.raises(ConfigError, match="bins is 0"):
        Binning(0)
