"""Measured throughput, and measurements and rounds that are put together from several runs."""

import dataclasses
import itertools

import numpy as np
import pytest

from modelopt_spec.decoding.generate import generate
from modelopt_spec.decoding.measure import pad_prompts
from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.cost_measure import measure_cost, pool_measurements
from modelopt_spec.scheduling.measured import ThroughputMeasurement, merge_measured
from modelopt_spec.scheduling.policies import FixedLength, NoSpeculation
from modelopt_spec.scheduling.rounds import join_rounds, rounds_from_records
from modelopt_spec.scheduling.sweep import compare_measured, simulate_loads
from tests.decoding.tiny import add_drafter, tiny_target
from tests.scheduling.synthetic import memory_bound_cost, round_records

POLICIES = {"none": lambda: NoSpeculation(5), "fixed": lambda: FixedLength(5)}


@pytest.fixture(scope="module")
def model():
    return add_drafter(tiny_target())


def measurement(model, **options):
    prompts = [[1, 2, 3 + i, 4] for i in range(4)]
    clock = itertools.count()
    return ThroughputMeasurement(model, prompts, 12, clock=lambda: float(next(clock)), **options)


def test_throughput_counts_the_tokens_of_the_rounds(model):
    """The clock ticks once when a batch's first round opens and once at its end: a second a batch."""
    measured = measurement(model)
    measured.add(POLICIES, 2)
    measured.add(POLICIES, 2)
    measured.add(POLICIES, 4, 4)
    report = measured.report()
    ids, mask = pad_prompts(measured.prompts)
    outputs = generate(model, ids, mask, max_new_tokens=12, eos_token_id=None, do_sample=False).outputs
    tokens = sum(len(output) - 1 for output in outputs)
    by_load = {(p["policy"], p["load"]): p for p in report["points"]}
    assert by_load["fixed", 2]["throughput"] == pytest.approx(tokens / 2)
    assert by_load["none", 4]["throughput"] == pytest.approx(tokens / 1)
    assert by_load["none", 2]["repeats"] == [tokens / 2, tokens / 2]
    assert report["prompts"] == {"2": 4, "4": 4}
    assert report["clock"] == "wall"


def test_reports_of_several_runs_are_merged_and_compared(model):
    reports = []
    for scale in (1.0, 3.0, 2.0):
        measured = measurement(model)
        measured.add(POLICIES, 2)
        report = measured.report()
        for point in report["points"]:
            point["repeats"] = [scale * value for value in point["repeats"]]
        reports.append(report)
    merged = merge_measured(reports)
    assert [point["throughput"] for point in merged["points"]] == [2 * 44 / 2, 2 * 44 / 2]
    assert merged["repeats"] == 3
    header, records = round_records(gamma=5)
    table = rounds_from_records(header, records)
    simulated = simulate_loads(table, memory_bound_cost(), loads=[2], load="batch", policies=["none", "fixed"])
    rows = compare_measured(simulated, merged)
    assert {(row["policy"], row["load"]) for row in rows} == {("none", 2.0), ("fixed", 2.0)}
    with pytest.raises(DataError, match="max_new_tokens 12 and 5"):
        merge_measured([*reports, reports[0] | {"max_new_tokens": 5}])
    with pytest.raises(DataError, match="with 4 and with 3 prompts"):
        merge_measured([*reports, reports[0] | {"prompts": {"2": 3}}])
    with pytest.raises(DataError, match="measure at least once"):
        merge_measured([])


def test_bad_loads_are_refused(model):
    with pytest.raises(ConfigError, match="a batch needs its prompts"):
        measurement(model).add(POLICIES, 5)
    measured = measurement(model)
    measured.add(POLICIES, 1, 2)
    with pytest.raises(ConfigError, match="was measured with 2 prompts before"):
        measured.add(POLICIES, 1, 3)
    short = dataclasses.replace(measurement(model), max_new_tokens=1)
    with pytest.raises(DataError, match="no round was needed"):
        short.add(POLICIES, 2)


def cost_slice(scale, requests=(1, 2)):
    ticks = [0.0]

    def step(count, tokens, context):
        ticks[0] += scale * (1.0 + 0.1 * tokens)

    return measure_cost(step, requests=requests, gamma=2, contexts=(8,), repeats=3, warmup=0, clock=lambda: ticks[0])


def test_slices_of_a_cost_measurement_pool_to_their_medians():
    pooled = pool_measurements([cost_slice(scale) for scale in (1.0, 5.0, 2.0)])
    assert [cell.seconds for cell in pooled.cells] == pytest.approx([2 * (1 + 0.1 * c.tokens) for c in pooled.cells])
    assert pooled.repeats == 9
    assert pooled.spread == pytest.approx([0.5] * len(pooled.cells))
    with pytest.raises(ConfigError, match="have different cells"):
        pool_measurements([cost_slice(1.0), cost_slice(1.0, (1, 2, 4))])
    with pytest.raises(ConfigError, match="at least one"):
        pool_measurements([])


def test_rounds_of_different_prompts_are_joined():
    header, records = round_records(gamma=5)
    one = rounds_from_records(header, records)
    two = join_rounds([one, one])
    count = int(one.prompt.max()) + 1
    assert len(two) == 2 * len(one)
    assert np.array_equal(two.prompt[len(one) :], one.prompt + count)
    assert np.array_equal(two.select(two.prompt >= count).confidence_logits, one.confidence_logits)
    stranger = rounds_from_records(header | {"temperature": 0.3}, records)
    with pytest.raises(DataError, match="temperature"):
        join_rounds([one, stranger])
    silent = dataclasses.replace(one, confidence_logits=None)
    with pytest.raises(DataError, match="others have none"):
        join_rounds([one, silent])
    with pytest.raises(DataError, match="at least one"):
        join_rounds([])


def test_recorded_lengths_can_be_cut():
    header, records = round_records(gamma=5)
    table = rounds_from_records(header, records)
    options = {"loads": [4], "load": "batch", "policies": ["fixed"]}
    cut = simulate_loads(table, memory_bound_cost(), max_output_tokens=7, **options)
    lengths = [min(int(table.committed[table.prompt == p].sum()), 7) for p in np.unique(table.prompt)]
    assert cut["policies"][0]["points"][0]["tokens"] == sum(lengths)
    with pytest.raises(ConfigError, match="max_output_tokens is 0"):
        simulate_loads(table, memory_bound_cost(), max_output_tokens=0, **options)
