import json

import numpy as np
import pytest

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.calibrate import write_report
from modelopt_spec.scheduling.cost import CostProfile, CostTable, cost_from_dict
from modelopt_spec.scheduling.cost_measure import deal_tokens, default_request_counts, default_token_grid, measure_cost
from modelopt_spec.scheduling.profile import fit_measurements, profile_cost, read_cost
from tests.scheduling.synthetic import memory_bound_cost


class Machine:
    """A clock that a step advances by a known time, with slow spells and outliers."""

    def __init__(self, seconds, noise=0.0):
        self.now, self.seconds, self.noise, self.calls = 0.0, seconds, noise, []
        self.rng = np.random.default_rng(0)

    def clock(self):
        return self.now

    def step(self, requests, tokens, context):
        self.calls.append((requests, tokens, context))
        spike = 5.0 if self.noise and self.rng.random() < 0.05 else 1.0
        self.now += self.seconds(requests, tokens, context) * spike * (1 + self.noise * self.rng.normal())

    def draft(self, requests, context):
        self.now += 0.001 * requests


COST = memory_bound_cost()


def seconds(requests, tokens, context):
    return float(COST.step_seconds(requests, tokens)) * (1 + context / 1000)


def test_medians_see_through_outliers():
    machine = Machine(seconds, noise=0.02)
    measured = measure_cost(machine.step, requests=[4, 8, 32], gamma=7, contexts=[0], repeats=15, clock=machine.clock)
    for cell in measured.cells:
        assert cell.seconds == pytest.approx(seconds(cell.requests, cell.tokens, 0), rel=0.05)
    assert 0 < np.median(measured.spread) < 0.05


def test_each_repeat_visits_every_cell_in_its_own_order():
    machine = Machine(seconds)
    measured = measure_cost(
        machine.step, requests=[1, 2], gamma=1, contexts=[0], repeats=3, warmup=1, clock=machine.clock
    )
    wanted = {(1, 1, 0), (1, 2, 0), (2, 2, 0), (2, 4, 0)}
    visits = [machine.calls[i : i + 4] for i in range(0, 16, 4)]
    assert all(set(visit) == wanted for visit in visits)
    assert len({tuple(visit) for visit in visits}) > 1
    assert {(c.requests, c.tokens, c.context) for c in measured.cells} == wanted


def test_uniform_steps_give_every_request_the_same():
    machine = Machine(seconds)
    measured = measure_cost(machine.step, requests=[2, 4], gamma=3, contexts=[0], uniform=True, clock=machine.clock)
    assert {(c.requests, c.tokens) for c in measured.cells} == {
        (2, 2), (2, 4), (2, 6), (2, 8), (4, 4), (4, 8), (4, 12), (4, 16)
    }  # fmt: skip


def test_draft_time_is_measured_and_added():
    machine = Machine(seconds)
    measured = measure_cost(
        machine.step, requests=[1, 2], gamma=1, contexts=[0], draft_fn=machine.draft, clock=machine.clock
    )
    for cell in measured.cells:
        assert cell.draft_seconds == pytest.approx(0.001 * cell.requests)
        assert cell.seconds == pytest.approx(seconds(cell.requests, cell.tokens, 0) + cell.draft_seconds)


def test_a_cliff_is_pinned_down():
    machine = Machine(lambda r, m, c: 0.01 + (0.02 if m > 21 else 0.0))
    report = profile_cost(
        machine.step, requests=[8, 16], gamma=3, contexts=[0], clock=machine.clock, refine_cliffs=6, hardware="test"
    )
    cost = cost_from_dict(report["cost"])
    assert cost.step_seconds(8, 21) == pytest.approx(0.01, rel=1e-3)
    assert cost.step_seconds(8, 22) == pytest.approx(0.03, rel=1e-3)
    assert report["hardware"] == "test"


def test_profile_over_contexts_and_its_file(tmp_path):
    machine = Machine(seconds)
    report = profile_cost(
        machine.step, requests=[2, 8, 32], gamma=3, contexts=[0, 1000], clock=machine.clock, draft_fn=machine.draft
    )
    path = write_report(report, tmp_path / "profile.json")
    cost = read_cost(path)
    assert isinstance(cost, CostProfile)
    assert cost.step_seconds(8, 32, 500) == pytest.approx(1.5 * seconds(8, 32, 0) + 0.008, rel=0.02)
    assert cost.plain_step_seconds(8, 0) == pytest.approx(seconds(8, 8, 0), rel=0.02)
    again = read_cost(write_report(report["measurements"], tmp_path / "measurements.json"))
    assert again == cost
    assert read_cost(write_report(report["cost"], tmp_path / "cost.json")) == cost


def test_one_axis_profile():
    machine = Machine(seconds)
    measured = measure_cost(machine.step, requests=[1, 32], gamma=3, contexts=[0], two_axes=False, clock=machine.clock)
    report = fit_measurements(measured, axes=1)
    assert isinstance(cost_from_dict(report["cost"]), CostTable)
    with pytest.raises(ConfigError, match="axes is 3"):
        fit_measurements(measured, axes=3)


def test_uninformative_machines_are_refused():
    flat = Machine(lambda r, m, c: 0.01)
    with pytest.raises(DataError, match="flat"):
        profile_cost(flat.step, requests=[1, 4], gamma=3, clock=flat.clock)
    assert (
        profile_cost(flat.step, requests=[1, 4], gamma=3, clock=flat.clock, check=False)["cost"]["kind"] == "additive"
    )


def test_tokens_are_dealt_evenly():
    assert deal_tokens(3, 3, 4).tolist() == [0, 0, 0]
    assert deal_tokens(3, 8, 4).tolist() == [2, 2, 1]
    assert deal_tokens(3, 15, 4).tolist() == [4, 4, 4]
    with pytest.raises(ConfigError, match="there are 3 to 15"):
        deal_tokens(3, 16, 4)
    assert default_token_grid([1, 2], 2) == [1, 2, 3, 4, 6]
    assert default_request_counts(1) == [1]
    assert default_request_counts(12) == [1, 2, 4, 8, 12]


def test_batch_sizes_that_share_no_tokens_are_refused_before_measuring():
    machine = Machine(seconds)
    with pytest.raises(DataError, match="Add request counts in between"):
        measure_cost(machine.step, requests=[1, 32], gamma=3, clock=machine.clock)
    assert machine.calls == []
    for gamma in (1, 7):
        measure_cost(machine.step, requests=default_request_counts(12), gamma=gamma, clock=machine.clock)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 2}, "repeats is 2"),
        ({"requests": []}, "name at least one batch size"),
        ({"requests": [0, 1]}, "each at least 1"),
        ({"tokens": [99]}, r"tokens \[99\]"),
        ({"uniform": True, "refine_cliffs": 1}, "refine_cliffs needs uneven steps"),
    ],
)
def test_bad_measurement_settings_are_refused(options, message):
    machine = Machine(seconds)
    with pytest.raises(ConfigError, match=message):
        measure_cost(machine.step, **({"requests": [1, 2], "gamma": 2, "clock": machine.clock} | options))


def test_files_without_a_cost_are_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_cost(tmp_path / "none.json")
    empty = tmp_path / "scheduler.json"
    empty.write_text(json.dumps({"kind": "mtsp.scheduler", "cost": None}))
    with pytest.raises(DataError, match="has no cost table"):
        read_cost(empty)
