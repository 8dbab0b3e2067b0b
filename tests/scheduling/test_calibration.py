import dataclasses

import numpy as np
import pytest

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.calibrate import calibrate_rounds, calibration_section, split_prompts, write_report
from modelopt_spec.scheduling.calibration import (
    CalibrationOptions,
    check_enough_rounds,
    check_temperatures,
    fit_shared_temperature,
    fit_sts,
    golden_section,
    sigmoid,
    survival,
    temperature_grid,
)
from modelopt_spec.scheduling.metrics import Binning, ece
from tests.scheduling.synthetic import round_records, round_table


@pytest.fixture(scope="module")
def table():
    return round_table(prompts=120)


def plain_sts(logits, prefix, grid, bins):
    """Left to right over the grid with nothing shared between candidates."""
    temperatures = []
    for k in range(logits.shape[1]):
        scores = []
        for t in grid:
            a = np.ones(len(logits))
            for j, t_j in enumerate([*temperatures, t]):
                a = a * 1.0 / (1.0 + np.exp(-logits[:, j] / t_j))
            scores.append(ece(a, prefix[:, k], Binning(bins)))
        temperatures.append(grid[int(np.argmin(scores))])
    return temperatures


def test_fit_equals_the_plain_search(table):
    z, prefix = table.confidence_logits[:400], table.accept_prefix()[:400]
    fit = fit_sts(z, prefix)
    assert fit.temperatures == pytest.approx(plain_sts(z, prefix, temperature_grid(), 15), abs=0)


def test_fit_recovers_the_overconfidence(table):
    fit = fit_sts(table.confidence_logits, table.accept_prefix())
    assert np.mean(np.log(fit.temperatures)) == pytest.approx(np.log(1.8), abs=0.25)
    assert np.mean(fit.ece_after) < 0.5 * np.mean(fit.ece_before)
    assert fit_shared_temperature(table.confidence_logits, table.accept_prefix()) == pytest.approx(1.8, rel=0.3)


def test_refinement_never_is_worse_than_the_grid(table):
    z, prefix = table.confidence_logits, table.accept_prefix()
    grid, refined = fit_sts(z, prefix), fit_sts(z, prefix, CalibrationOptions(refine=True))
    assert refined.ece_after[0] <= grid.ece_after[0]
    assert refined.grid_index[0] == grid.grid_index[0]
    shared = fit_shared_temperature(z, prefix, CalibrationOptions(refine=True))
    total = [sum(ece(survival(z / t)[:, k], prefix[:, k], Binning(15)) for k in range(4)) for t in (shared, 1.0)]
    assert total[0] < total[1]


def test_golden_section_finds_a_minimum():
    x, value = golden_section(lambda v: (v - 0.3) ** 2, -1.0, 1.0, 1e-5)
    assert x == pytest.approx(0.3, abs=1e-4)
    assert value == pytest.approx(0.0, abs=1e-8)


def test_temperatures_keep_the_order_of_confidences(table):
    z = table.confidence_logits
    fit = fit_sts(z, table.accept_prefix())
    for k, t in enumerate(fit.temperatures):
        assert (np.argsort(sigmoid(z[:, k]), kind="stable") == np.argsort(sigmoid(z[:, k] / t), kind="stable")).all()


def test_sigmoid_and_survival_do_not_overflow():
    assert sigmoid(np.array([-800.0, 0.0, 800.0, np.inf, -np.inf])).tolist() == [0.0, 0.5, 1.0, 1.0, 0.0]
    assert survival(np.array([[0.0, 0.0]]), [1.0, 2.0]).tolist() == [[0.5, 0.25]]


@pytest.mark.parametrize("bad", [[1.0, -1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_bad_temperatures_are_refused(bad):
    with pytest.raises(ConfigError, match="positive and finite"):
        check_temperatures(bad, 2)


def test_wrong_number_of_temperatures_is_refused():
    with pytest.raises(ConfigError, match=r"3 entries.*2 slots"):
        check_temperatures([1.0, 1.0, 1.0], 2)


def test_bad_rounds_are_refused():
    with pytest.raises(DataError, match="round 0, slot 1 is NaN"):
        fit_sts(np.array([[0.0, np.nan]]), np.array([[1, 1]]))
    with pytest.raises(DataError, match="after a rejection"):
        fit_sts(np.zeros((1, 2)), np.array([[0, 1]]))
    with pytest.raises(DataError, match=r"must be \[rounds, slots\]"):
        fit_sts(np.zeros((0, 2)), np.zeros((0, 2)))


def test_too_few_rounds_are_refused_with_the_number_needed(table):
    z, prefix = table.confidence_logits[:100], table.accept_prefix()[:100]
    with pytest.raises(DataError, match=r"100 rounds are too few.*About ([0-9]+) rounds") as caught:
        check_enough_rounds(z, prefix, CalibrationOptions())
    needed = int(str(caught.value).split("About ")[1].split()[0])
    assert needed > 100
    check_enough_rounds(
        np.tile(z, (needed // 100 + 1, 1)), np.tile(prefix, (needed // 100 + 1, 1)), CalibrationOptions()
    )


def test_a_slot_that_was_never_accepted_is_refused():
    z = np.zeros((5000, 2))
    prefix = np.zeros((5000, 2))
    prefix[:2500, 0] = 1
    with pytest.raises(DataError, match="slot 1 was accepted in none of 5000"):
        check_enough_rounds(z, prefix, CalibrationOptions())


def test_report_halves_the_error_on_held_out_prompts(table, tmp_path):
    report = calibrate_rounds(table, options=CalibrationOptions(bootstrap=20), dataset="synthetic")
    held = report["held_out"]
    assert held["mean_ece"]["after"] < 0.5 * held["mean_ece"]["before"]
    low, high = held["mean_ece_interval"]["after"]
    assert 0 < low < high < 0.1
    for slot, (lower, upper), t in zip(held["slots"], report["temperature_intervals"], report["temperatures"]):
        assert lower <= t <= upper
        assert slot["auc_conditional"]["after"] == pytest.approx(slot["auc_conditional"]["before"], abs=1e-12)
        assert slot["brier"]["after"] < slot["brier"]["before"]
    assert report["fit"]["prompts"] + held["prompts"] == 120
    section = calibration_section(report)
    assert section.temperatures == tuple(report["temperatures"])
    assert section.ece_after == tuple(slot["ece"]["after"] for slot in held["slots"])
    assert write_report(report, tmp_path / "new" / "report.json").is_file()


def test_split_never_shares_a_prompt(table):
    fit, judge = split_prompts(table, 0.3, seed=3)
    assert not set(fit.prompt) & set(judge.prompt)
    assert len(fit) + len(judge) == len(table)
    assert split_prompts(table, 0.0, seed=3) == (table, None)
    with pytest.raises(ConfigError, match=r"held_out_share is 1\.0"):
        split_prompts(table, 1.0, seed=0)


def test_separate_held_out_rounds(table):
    quick = CalibrationOptions(bootstrap=0)
    report = calibrate_rounds(table, held_out=round_table(seed=9), options=quick)
    assert report["fit"]["prompts"] == 120
    assert report["held_out"]["rounds"] == 60 * 30
    assert report["temperature_intervals"] is None
    with pytest.raises(DataError, match="gamma 3"):
        calibrate_rounds(table, held_out=round_table(gamma=3), options=quick)


def test_rounds_without_a_confidence_head_cannot_be_calibrated():
    header, records = round_records(prompts=2, rounds=2)
    from modelopt_spec.scheduling.rounds import rounds_from_records

    without = [row | {"confidence_logits": None} for row in records]
    with pytest.raises(DataError, match="no confidence head"):
        calibrate_rounds(rounds_from_records(header, without))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid_points": 1}, "grid_points is 1"),
        ({"lowest": 0.0}, "must be positive"),
        ({"interval": 95.0}, "interval is 95"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CalibrationOptions(**options)


def test_cross_validation_judges_every_round_with_other_prompts_temperatures(table):
    options = CalibrationOptions(bootstrap=0)
    report = calibrate_rounds(table, options=options, folds=4)
    crossed = report["cross_validation"]
    usable = table.calibration_rounds()
    assert (crossed["folds"], crossed["rounds"]) == (4, len(usable))
    assert crossed["mean_ece"]["after"] < 0.5 * crossed["mean_ece"]["before"]
    shuffled = np.random.default_rng(0).permutation(np.unique(usable.prompt))
    predicted = np.zeros((len(usable), usable.gamma))
    for fold in np.array_split(shuffled, 4):
        mine = np.isin(usable.prompt, fold)
        others = usable.select(~mine)
        fitted = fit_sts(others.confidence_logits, others.accept_prefix(), options)
        predicted[mine] = survival(usable.confidence_logits[mine], fitted.temperatures)
    want = [ece(predicted[:, k], usable.accept_prefix()[:, k], options.binning) for k in range(usable.gamma)]
    assert [slot["ece"]["after"] for slot in crossed["slots"]] == pytest.approx(want)
    with pytest.raises(ConfigError, match="folds is 1"):
        calibrate_rounds(table, options=options, folds=1)


def test_an_offset_repairs_what_temperatures_cannot(table):
    """Overconfidence around a centre far below 0.5: temperatures pull to the wrong place. The order stays."""
    low = dataclasses.replace(table, confidence_logits=table.confidence_logits * 1.5 - 2.0)
    plain, shifted = (
        calibrate_rounds(low, options=CalibrationOptions(bootstrap=0, offset=offset), folds=3)
        for offset in (False, True)
    )
    assert plain["offset"] == 0.0
    assert shifted["offset"] > 0.5
    for part in ("held_out", "cross_validation"):
        assert shifted[part]["mean_ece"]["after"] < 0.6 * plain[part]["mean_ece"]["after"]
    for slot in shifted["held_out"]["slots"]:
        assert slot["auc_conditional"]["after"] == pytest.approx(slot["auc_conditional"]["before"], abs=1e-12)
    assert calibration_section(shifted).offset == shifted["offset"]
