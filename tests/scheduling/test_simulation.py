import dataclasses
import json

import numpy as np
import pytest

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.reports import scheduling as figures
from modelopt_spec.scheduling.calibrate import calibrate_rounds
from modelopt_spec.scheduling.calibration import CalibrationOptions
from modelopt_spec.scheduling.cost import AdditiveCostTable, CostProfile, CostTable
from modelopt_spec.scheduling.policies import FixedLength, NoSpeculation, PrefixScheduler, StaticThreshold
from modelopt_spec.scheduling.rounds import rounds_from_records
from modelopt_spec.scheduling.simulation import Engine, simulate, simulate_batches, summarise
from modelopt_spec.scheduling.simulation_reference import simulate_reference
from modelopt_spec.scheduling.sweep import compare_measured, policy_from_name, simulate_loads
from modelopt_spec.scheduling.workload import AcceptanceProcess, closed_loop, open_loop
from tests.scheduling.synthetic import memory_bound_cost, round_records, round_table

GAMMA = 4
COST = memory_bound_cost()


@pytest.fixture(scope="module")
def table():
    return round_table(prompts=40, rounds=20)


@pytest.fixture(scope="module")
def process(table):
    return AcceptanceProcess.from_rounds(table)


POLICIES = {
    "none": lambda: NoSpeculation(GAMMA),
    "fixed": lambda: FixedLength(GAMMA, 2),
    "threshold": lambda: StaticThreshold(GAMMA, 0.6),
    "scheduler": lambda: PrefixScheduler(COST, GAMMA, temperatures=[1.8] * GAMMA),
    "early_stop": lambda: PrefixScheduler(COST, GAMMA, method="early_stop"),
    "padded": lambda: PrefixScheduler(COST, GAMMA, padded=True),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("acceptance", ["sequential", "bootstrap"])
@pytest.mark.parametrize("load", ["closed", "open"])
def test_vectorised_equals_request_by_request(table, name, acceptance, load):
    process = AcceptanceProcess.from_rounds(table, acceptance, seed=3)
    profile = CostProfile((20, 60), (COST, memory_bound_cost(8)))
    engine = Engine(profile, 5, name == "padded", 20000.0 if load == "open" else None, 1e-4)
    if load == "closed":
        work = closed_loop(process, requests=23)
    else:
        work = open_loop(process, requests=23, rate=12.0, output_tokens=17)
    fast = simulate(process, work, engine, POLICIES[name]())
    plain = simulate_reference(process, work, engine, POLICIES[name]())
    for field in dataclasses.fields(fast):
        got, want = getattr(fast, field.name), getattr(plain, field.name)
        assert got == pytest.approx(want, rel=1e-12), field.name
    assert (fast.start >= work.arrival).all()
    assert fast.committed.sum() == work.output_tokens.sum()


def test_full_verification_replays_the_record(table, process):
    """One request at a time with whole blocks: the committed tokens of each step are the recorded ones."""
    work = closed_loop(process, requests=1)
    log = simulate(process, work, Engine(COST, 1), FixedLength(GAMMA))
    prompt = table.prompt[work.first_row[0]]
    assert log.committed.tolist() == table.committed[table.prompt == prompt].tolist()
    assert log.seconds[0] == pytest.approx(float(COST.step_seconds(1, 1 + GAMMA)))


def test_batches_are_drained_one_after_the_other(table, process):
    """Whole blocks in batches replay every recorded prompt once; the time is the sum of the batches' times."""
    report = simulate_loads(table, COST, loads=[1, 16], load="batch", policies=["fixed"])
    one, many = report["policies"][0]["points"]
    assert one["tokens"] == many["tokens"] == table.committed.sum()
    assert one["seconds"] == pytest.approx(len(table) * float(COST.step_seconds(1, 1 + GAMMA)), rel=0.02)
    assert many["throughput"] == pytest.approx(many["throughput_all"])
    assert many["throughput"] > 5 * one["throughput"]
    assert many["wait_seconds"] == pytest.approx(0.0, abs=1e-9)
    log, work = simulate_batches(process, Engine(COST, 16), FixedLength(GAMMA))
    assert (np.diff(log.end) > 0).all()
    assert (log.start >= work.arrival).all()
    assert log.running.max() == 16


def test_no_speculation_is_the_plain_rate(process):
    work = closed_loop(process, requests=40, output_tokens=25)
    engine = Engine(COST, 8)
    result = summarise(simulate(process, work, engine, NoSpeculation()), work, engine)
    assert result.throughput == pytest.approx(8 / COST.plain_step_seconds(8), rel=1e-9)
    assert result.user_rate == pytest.approx(1 / COST.plain_step_seconds(8), rel=1e-9)
    assert result.accepted_length == 1.0
    assert result.verified_tokens == 0.0


def test_arrivals_wait_for_a_free_place(process):
    work = open_loop(process, requests=200, rate=1e6, output_tokens=10)
    engine = Engine(COST, 4)
    log = simulate(process, work, engine, FixedLength(GAMMA))
    assert log.running.max() == 4
    assert (np.diff(log.start) >= 0).all()
    assert summarise(log, work, engine).wait_seconds > 0.1
    idle = open_loop(process, requests=30, rate=0.05, output_tokens=10)
    calm = summarise(simulate(process, idle, engine, FixedLength(GAMMA)), idle, engine)
    assert calm.wait_seconds == pytest.approx(0.0, abs=1e-9)
    assert calm.running == pytest.approx(1.0)
    assert calm.throughput_all < 1.0


def test_scheduler_is_never_below_fixed_lengths_and_wins_under_load(table):
    fixed = [f"fixed:{k}" for k in range(1, GAMMA + 1)]
    report = simulate_loads(
        table, COST, loads=[1, 8, 64, 256], policies=[*fixed, "scheduler"], temperatures=[1.8] * GAMMA, output_tokens=64
    )
    curves = {curve["name"]: [p["throughput"] for p in curve["points"]] for curve in report["policies"]}
    best = np.max([curves[name] for name in fixed], axis=0)
    gain = np.array(curves["scheduler"]) / best
    assert (gain > 0.98).all()
    assert gain[-1] > 1.05
    assert curves["scheduler"][-1] > 1.3 * curves[f"fixed:{GAMMA}"][-1]


def test_calibrated_scheduler_beats_the_overconfident_one(table):
    raw, calibrated = (
        simulate_loads(table, COST, loads=[128], policies=["scheduler"], temperatures=t)["policies"][0]["points"][0]
        for t in (None, [1.8] * GAMMA)
    )
    assert raw["verified_tokens"] > calibrated["verified_tokens"]
    assert raw["throughput"] < calibrated["throughput"]


def test_beyond_the_measured_batch_is_refused_unless_asked_for(table):
    short = memory_bound_cost(last=64)
    with pytest.raises(DataError, match="more than 64 batch tokens"):
        simulate_loads(table, short, loads=[32], policies=["fixed"])
    report = simulate_loads(table, short, loads=[32], policies=["fixed"], extrapolate=True)
    assert report["engine"]["extrapolated"]
    assert report["engine"]["measured_tokens"] == 64
    exact = simulate_loads(table, COST, loads=[32], policies=["fixed"])
    ratio = report["policies"][0]["points"][0]["throughput"] / exact["policies"][0]["points"][0]["throughput"]
    assert ratio == pytest.approx(1.0, abs=0.02)


def test_open_loop_sweep_and_its_files(table, tmp_path):
    report = simulate_loads(table, COST, loads=[2.0, 5.0], load="rate", max_running=16, requests=60)
    assert json.loads(json.dumps(report)) == report
    assert [curve["name"] for curve in report["policies"]] == ["none", "fixed", "threshold:0.5", "scheduler"]
    for path in (
        figures.throughput_figure(report, tmp_path / "a.png"),
        figures.load_figure(report, tmp_path / "b.png"),
    ):
        assert path.stat().st_size > 5000
    assert figures.simulation_table(report).count("\n") == 2 + 8


def test_comparison_with_measured_throughput(table, tmp_path):
    report = simulate_loads(table, COST, loads=[1, 4], policies=["fixed", "scheduler"], requests=16)
    simulated = report["policies"][0]["points"][1]["throughput_all"]
    measured = {"points": [{"policy": "fixed", "load": 4, "throughput": simulated / 1.05}]}
    (row,) = compare_measured(report, measured)
    assert row["relative_error"] == pytest.approx(0.05)
    assert "+5.0%" in figures.comparison_table([row])
    assert figures.load_figure(report, tmp_path / "m.png", measured).is_file()
    assert figures.throughput_figure(report, tmp_path / "t.png", measured).is_file()
    with pytest.raises(DataError, match="was not simulated"):
        compare_measured(report, {"points": [{"policy": "fixed", "load": 2, "throughput": 1.0}]})


def test_calibration_and_cost_figures(table, tmp_path):
    report = calibrate_rounds(table, options=CalibrationOptions(bootstrap=5, max_noise=0.2))
    assert figures.reliability_figure(report, tmp_path / "r.png").stat().st_size > 5000
    assert figures.ece_figure(report, tmp_path / "e.png").stat().st_size > 5000
    assert figures.calibration_table(report).count("\n") == 2 + GAMMA + 1
    cells = [
        {"requests": r, "tokens": r * n, "context": 8, "seconds": float(COST.step_seconds(r, r * n))}
        for r in (1, 32)
        for n in (1, 3, 5)
    ]
    profile = {"measurements": {"cells": cells}, "cost": COST.to_dict(), "hardware": "test"}
    assert figures.cost_figure(profile, tmp_path / "c.png").stat().st_size > 5000


def test_rounds_without_confidences_can_be_simulated():
    header, records = round_records(prompts=4, rounds=5)
    bare = rounds_from_records(header, [row | {"confidence_logits": None} for row in records])
    report = simulate_loads(bare, COST, loads=[2], policies=["fixed", "threshold:0.5", "scheduler"], requests=8)
    rates = [curve["points"][0]["throughput"] for curve in report["policies"]]
    assert rates == pytest.approx([rates[0]] * 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: simulate_loads(t, COST, loads=[]), "loads is empty"),
        (lambda t: simulate_loads(t, COST, loads=[1], load="users"), "one of concurrency, rate, batch"),
        (lambda t: simulate_loads(t, COST, loads=[1], acceptance="magic"), "acceptance process is 'magic'"),
        (lambda t: simulate_loads(t, COST, loads=[1], policies=["greedy"]), "policy 'greedy' is unknown"),
        (lambda t: simulate_loads(t, COST, loads=[1], policies=["fixed:x"]), "'x' is no number"),
        (lambda t: simulate_loads(t, COST, loads=[1], policies=["threshold"]), "needs its probability"),
        (lambda t: simulate_loads(t, COST, loads=[1], output_tokens=0), "output_tokens is 0"),
        (lambda t: simulate_loads(t, COST, loads=[0]), "loads is 0: it must be a whole number of at least 1"),
        (lambda t: simulate_loads(t, COST, loads=[float("nan")]), "loads is nan: it must be a whole number"),
        (lambda t: simulate_loads(t, COST, loads=[1], requests=-1), "requests is -1: it must be a whole number"),
        (lambda t: simulate_loads(t, COST, loads=[1], requests=0), "requests is 0: it must be a whole number"),
        (lambda t: simulate_loads(t, COST, loads=[1], seed=-1), "seed is -1: it must be a whole number"),
        (lambda t: simulate_loads(t, COST, loads=[1], policies=["fixed:nan"]), "length of policy 'fixed:nan' is nan"),
        (lambda t: simulate_loads(t, COST, loads=[0.0], load="rate"), "loads is 0.0: it must be a positive number of"),
        (lambda t: simulate_loads(t, COST, loads=[1], prefill_tokens_per_second=0.0), "prefill_tokens_per_second is 0"),
        (lambda t: policy_from_name("scheduler", gamma=GAMMA), "needs a cost table"),
        (
            lambda t: simulate(
                AcceptanceProcess.from_rounds(t), closed_loop(AcceptanceProcess.from_rounds(t), requests=1),
                Engine(COST, 1), FixedLength(9),
            ),
            "gamma 9, the recorded rounds have gamma 4",
        ),
    ],
)  # fmt: skip
def test_bad_simulations_are_refused(table, call, message):
    with pytest.raises(ConfigError, match=message):
        call(table)


def test_censored_rounds_cannot_be_replayed():
    header, records = round_records(prompts=2, rounds=2)
    cut = [row | {"verified": 1, "accepted": min(row["accepted"], 1)} for row in records]
    with pytest.raises(DataError, match="none of 4 rounds verified a full block"):
        AcceptanceProcess.from_rounds(rounds_from_records(header, cut))


def test_one_axis_tables_can_be_simulated(table):
    stairs = CostTable((1, 33, 65), (100.0, 60.0, 40.0))
    report = simulate_loads(table, stairs, loads=[4], policies=["none", "scheduler"], extrapolate=True)
    assert all(curve["points"][0]["throughput"] > 0 for curve in report["policies"])
    assert isinstance(COST, AdditiveCostTable)
