import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.cost import (
    AdditiveCostTable,
    CostProfile,
    CostTable,
    check_informative,
    cost_from_dict,
)
from modelopt_spec.scheduling.cost_extend import extended
from modelopt_spec.scheduling.cost_fit import Cell, fit_additive, fit_one_axis, fit_profile, isotonic
from tests.scheduling.synthetic import memory_bound_cost

STAIRS = CostTable((2, 5, 9), (10.0, 8.0, 4.0))
SUM = AdditiveCostTable(0.01, (1, 4, 8), (0.0, 0.001, 0.002), (1, 16, 32), (0.0, 0.002, 0.01), (0.001, 0.002, 0.003))


def test_lookups():
    assert STAIRS.steps_per_second(7, [1, 2, 4, 5, 8, 9, 99]).tolist() == [10, 10, 10, 8, 8, 4, 4]
    line = CostTable((2, 4), (10.0, 6.0), "linear")
    assert line.steps_per_second(7, [1, 3, 9]).tolist() == [10, 8, 6]
    assert CostTable.dense([0.0, 3.0, 2.0]).steps_per_second(1, [1, 2, 3]).tolist() == [3, 2, 2]
    assert SUM.step_seconds(4, [16, 24]) == pytest.approx([0.013, 0.017])
    assert SUM.step_seconds(6, 1) == pytest.approx(0.0115)
    assert SUM.steps_per_second(99, 99) == pytest.approx(1 / 0.022)
    assert SUM.plain_step_seconds(4) == pytest.approx(0.01 + 0.001 + 0.002 * 3 / 15 - 0.002)
    assert STAIRS.plain_step_seconds(5) == pytest.approx(1 / 8)


def test_profile_interpolates_between_contexts():
    slow = AdditiveCostTable(0.03, (1,), (0.0,), (1,), (0.0,))
    fast = AdditiveCostTable(0.01, (1,), (0.0,), (1,), (0.0,), (0.004,))
    profile = CostProfile((100, 300), (fast, slow))
    for context, seconds in ((None, 0.01), (50, 0.01), (100, 0.01), (200, 0.02), (300, 0.03), (900, 0.03)):
        assert profile.step_seconds(1, 1, context) == pytest.approx(seconds)
    assert profile.plain_step_seconds(1, 200) == pytest.approx(0.018)
    assert profile.at(290) is slow
    assert profile.max_tokens == 1


@pytest.mark.parametrize("cost", [STAIRS, SUM, CostProfile((5, 9), (SUM, STAIRS)), CostTable((1,), (2.0,), "linear")])
def test_json_form_returns_the_same_table(cost):
    assert cost_from_dict(json.loads(json.dumps(cost.to_dict()))) == cost


def test_normalised_and_extended_keep_the_times():
    raised = AdditiveCostTable(0.0, (1, 4), (0.003, 0.004), (1, 8, 16), (0.01, 0.012, 0.02))
    for requests in (1, 2, 4):
        for tokens in (1, 5, 16):
            expected = raised.step_seconds(requests, tokens)
            assert raised.normalised().step_seconds(requests, tokens) == pytest.approx(expected, abs=1e-15)
            longer = extended(raised, tokens=64, requests=8)
            assert longer.step_seconds(requests, tokens) == pytest.approx(expected, abs=1e-15)
    assert longer.max_tokens == 64
    assert longer.step_seconds(1, 64) == pytest.approx(0.003 + 0.02 + 48 * 0.001)
    assert longer.step_seconds(8, 1) > raised.step_seconds(8, 1)
    stairs = extended(STAIRS, tokens=20)
    for tokens in range(2, 10):
        assert stairs.step_seconds(1, tokens) == pytest.approx(STAIRS.step_seconds(1, tokens))
    assert stairs.step_seconds(1, 20) > stairs.step_seconds(1, 9)
    assert extended(CostProfile((5,), (SUM,)), tokens=64).max_tokens == 64
    assert extended(SUM, tokens=8) == SUM


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CostTable((), ()), "batch_tokens is empty"),
        (lambda: CostTable((1, 2), (1.0,)), "has 2 entries, steps_per_second 1"),
        (lambda: CostTable((2, 1), (1.0, 1.0)), "strictly increasing"),
        (lambda: CostTable((1, 2), (1.0, float("nan"))), "finite and positive"),
        (lambda: CostTable((1, 2), (1.0, 0.0)), "finite and positive"),
        (lambda: CostTable((1,), (1.0,), "cubic"), "lookup is 'cubic'"),
        (lambda: AdditiveCostTable(-1.0, (1,), (0.0,), (1,), (1.0,)), "bias_seconds is -1"),
        (lambda: AdditiveCostTable(0.0, (1,), (0.0,), (1,), (0.0,)), "add up to 0"),
        (lambda: AdditiveCostTable(1.0, (1,), (-0.1,), (1,), (0.0,)), "alpha_seconds holds"),
        (lambda: AdditiveCostTable(1.0, (1,), (0.0,), (1,), (0.0,), (0.1, 0.2)), "draft_seconds 2"),
        (lambda: CostProfile((1, 2), (SUM,)), "give one table a context"),
        (lambda: CostProfile((2, 1), (SUM, SUM)), "strictly increasing"),
        (lambda: cost_from_dict({"kind": "cubic"}), "known are"),
        (lambda: cost_from_dict({"kind": "additive"}), "lacks the key"),
    ],
)
def test_bad_tables_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_flat_and_inert_tables_are_refused():
    flat = CostTable((1, 64), (10.0, 9.99))
    with pytest.raises(DataError, match="flat"):
        check_informative(flat, gamma=4, requests=[1, 8])
    gentle = AdditiveCostTable(1.0, (1, 8), (0.0, 0.0), (1, 64), (0.0, 0.03))
    with pytest.raises(DataError, match="inert"):
        check_informative(gentle, gamma=4, requests=[1, 8])
    check_informative(memory_bound_cost(), gamma=4, requests=[1, 64])
    with pytest.raises(DataError, match="flat"):
        check_informative(memory_bound_cost(), gamma=4, requests=[1, 2])


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 3)), min_size=1, max_size=12))
def test_isotonic_is_the_projection(rows):
    """Non-decreasing, keeps the weighted mean, and no block can be improved by moving it."""
    values, weights = (np.array(column) for column in zip(*rows))
    fit = isotonic(values, weights)
    assert (np.diff(fit) >= -1e-12).all()
    assert (fit * weights).sum() == pytest.approx((values * weights).sum(), abs=1e-9)
    residual = np.cumsum(weights * (values - fit))
    assert (residual <= 1e-9).all() or (residual >= -1e-9).any()
    assert float((residual * np.append(np.diff(fit), 0.0)).sum()) == pytest.approx(0.0, abs=1e-7)


def cells_of(cost, requests, gamma, noise=0.0, context=128):
    rng = np.random.default_rng(0)
    grid = sorted({r * (k + 1) for r in requests for k in range(gamma + 1)})
    return [
        Cell(r, m, context, float(cost.step_seconds(r, m)) * (1 + noise * rng.normal()), 0.001 * r)
        for r in requests
        for m in grid
        if r <= m <= r * (gamma + 1)
    ]


def test_additive_fit_recovers_the_sum_and_its_cliff():
    tokens = tuple(range(1, 129))
    theta = tuple(0.0001 * m + (0.02 if m > 48 else 0.0) for m in tokens)
    truth = AdditiveCostTable(0.01, (1, 2, 4, 8, 16), (0.0, 0.001, 0.004, 0.005, 0.02), tokens, theta)
    cells = cells_of(truth, (1, 2, 4, 8, 16), 7)
    table, quality = fit_additive(cells)
    assert quality.worst < 1e-4
    for cell in cells:
        assert table.step_seconds(cell.requests, cell.tokens) == pytest.approx(cell.seconds, rel=1e-4)
    assert table.draft_seconds == pytest.approx([0.001, 0.002, 0.004, 0.008, 0.016])
    noisy, rough = fit_additive(cells_of(truth, (1, 2, 4, 8, 16), 7, noise=0.03))
    assert (np.diff(noisy.theta_seconds) >= 0).all()
    assert rough.rms < 0.04


def test_one_axis_fit_pools_and_never_falls():
    cells = [Cell(1, 2, 0, 0.010), Cell(2, 2, 0, 0.014), Cell(1, 4, 0, 0.011), Cell(2, 8, 0, 0.02)]
    table, quality = fit_one_axis(cells)
    assert table.batch_tokens == (2, 4, 8)
    assert (np.diff(table.steps_per_sec) <= 0).all()
    assert quality.cells == 4
    assert quality.worst > 0.1


def test_profile_fit_keeps_contexts_apart():
    near, far = memory_bound_cost(8, 64), memory_bound_cost(4, 64)
    cells = cells_of(near, (1, 2, 4), 3, context=100) + cells_of(far, (1, 2, 4), 3, context=900)
    profile, qualities = fit_profile(cells)
    assert profile.contexts == (100, 900)
    assert max(q.worst for q in qualities) < 1e-3
    with pytest.raises(DataError, match="several context lengths"):
        fit_additive(cells)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([], "no measured cell"),
        ([Cell(1, 1, 0, 0.0)], "must be positive"),
        ([Cell(1, 1, 0, float("nan"))], "must be positive"),
        ([Cell(4, 2, 0, 0.1)], "sends at least one"),
        ([Cell(1, 1, 0, 0.1), Cell(2, 4, 0, 0.1)], r"\[2\] share no token count"),
    ],
)
def test_bad_measurements_are_refused(cells, message):
    with pytest.raises(DataError, match=message):
        fit_additive(cells)


def test_plain_steps_are_taken_as_measured():
    """A single token a request can be slower than two, which a theta that never falls cannot say."""
    cells = [
        Cell(requests, requests * width, 8, 0.1 * requests + 0.01 * requests * width + slow + 0.02, 0.02)
        for requests in (1, 2, 4)
        for width, slow in ((1, 0.05), (2, 0.0), (4, 0.0))
    ]
    table, _ = fit_additive(cells)
    assert table.plain_seconds == pytest.approx([0.11 * requests + 0.05 for requests in (1, 2, 4)])
    assert table.plain_step_seconds(2) == pytest.approx(0.27)
    assert table.plain_step_seconds(3) == pytest.approx((0.27 + 0.49) / 2)
    assert table.plain_step_seconds(2) > float(table.step_seconds(2, 2)) - 0.02
    assert cost_from_dict(table.to_dict()) == table
    assert extended(table, tokens=64, requests=8).plain_step_seconds(8) == pytest.approx(0.93)
    silent, _ = fit_additive([dataclasses.replace(cell, draft_seconds=0.0) for cell in cells])
    assert silent.plain_seconds is None
    with pytest.raises(ConfigError, match="plain_seconds holds"):
        dataclasses.replace(table, plain_seconds=(0.1, 0.0, 0.1))
