"""From recorded rounds to a calibration report: fit on some prompts, judge on others.

The report (JSON, ``mtsp calibrate`` writes it, the figures read it)::

    {"kind": "mtsp.calibration", "version": 1, "gamma": G, "dataset": str, "rounds": header of the round file,
     "options": {...}, "dropped_rounds": int,
     "offset": float, "temperatures": [G], "shared_temperature": float, "prior": [G],
     "temperature_intervals": [[low, high]] * G | null,
     "fit": METRICS, "held_out": METRICS | null, "cross_validation": {"folds": int, ...METRICS} | null}

    METRICS = {"rounds": int, "prompts": int,
               "mean_ece": {"before", "after", "shared"}, "mean_ece_interval": {...: [low, high]} | null,
               "slots": [{"slot", "survival", "noise_floor",
                          "ece": {"before", "after", "shared"}, "ece_interval": {...} | null,
                          "auc": {"before", "after"}, "auc_conditional": {"before", "after"},
                          "brier": {"before", "after", "shared"},
                          "reliability": {"before": [{"count", "predicted", "observed"}], "after": [...]}}] * G}

``before`` is the raw logit, ``after`` the offset (0 unless asked for) and one temperature a slot, ``shared`` the offset
and the single one. ``auc`` ranks survivals, which mix
slots; ``auc_conditional`` ranks the slot's own confidence among rounds that accepted everything before it, which no
temperature can change. Intervals come from drawing prompts with replacement.

Cross-validation uses every round for judging: the prompts are dealt into folds, and each fold is judged with
temperatures that were fitted on the others. It says what calibration does to unseen prompts, with less noise than one
split.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.calibration import (
    CalibrationOptions,
    check_enough_rounds,
    fit_offset,
    fit_shared_temperature,
    fit_sts,
    sigmoid,
    survival,
)
from modelopt_spec.scheduling.metrics import auc, brier, ece, ece_noise_floor, reliability_bins
from modelopt_spec.scheduling.rounds import RoundTable, read_rounds
from modelopt_spec.scheduling.scheduler_file import CalibrationSection

__all__ = ["CALIBRATION_KIND", "calibrate_rounds", "calibration_section", "split_prompts", "write_report"]

CALIBRATION_KIND = "mtsp.calibration"
FloatArray = NDArray[np.floating[Any]]


def calibrate_rounds(
    rounds: RoundTable | str | Path,
    *,
    held_out: RoundTable | str | Path | None = None,
    held_out_share: float = 0.3,
    folds: int = 0,
    options: CalibrationOptions | None = None,
    dataset: str = "",
) -> dict[str, Any]:
    """Fit temperatures and report what they do.

    Args:
        rounds: round table or file; only full blocks with confidences count.
        held_out: rounds of other prompts to judge on. Without it, ``held_out_share`` of the prompts are kept out of the
            fit (0 for none).
        held_out_share: share of prompts, chosen by the seed of ``options``.
        folds: cross-validate with so many folds of prompts; 0 for none.
        options: grid, bins, intervals and refusal limits.
        dataset: name of the prompts, for the engines' files.

    Returns:
        The report of the module's docstring.

    Raises:
        DataError: no confidences, too few rounds (with the number needed), or rounds of one prompt only.
    """
    options = options or CalibrationOptions()
    table = rounds if isinstance(rounds, RoundTable) else read_rounds(rounds)
    usable = table.calibration_rounds()
    if held_out is not None:
        other = held_out if isinstance(held_out, RoundTable) else read_rounds(held_out)
        if other.gamma != table.gamma:
            raise DataError(f"held-out rounds have gamma {other.gamma}, the rounds to fit {table.gamma}")
        split: tuple[RoundTable, RoundTable | None] = (usable, other.calibration_rounds())
    else:
        split = split_prompts(usable, held_out_share, options.seed)
    fit_rows, judge = split
    z, labels = _arrays(fit_rows)
    check_enough_rounds(z, labels, options)
    offset = fit_offset(z, labels, options) if options.offset else 0.0
    z = z + offset
    fitted = fit_sts(z, labels, options)
    shared = fit_shared_temperature(z, labels, options)
    intervals = None
    if options.bootstrap:
        draws = _bootstrap(
            fit_rows, options, lambda weight: np.array(fit_sts(z, labels, options, weight=weight).temperatures)
        )
        intervals = _interval(draws, options).T.tolist()
    temperatures = np.asarray(fitted.temperatures)
    return {
        "kind": CALIBRATION_KIND,
        "version": 1,
        "gamma": table.gamma,
        "dataset": dataset,
        "rounds": dict(table.header),
        "options": asdict(options),
        "dropped_rounds": len(table) - len(usable),
        "offset": offset,
        "temperatures": list(fitted.temperatures),
        "shared_temperature": shared,
        "prior": sigmoid(z / temperatures).mean(axis=0).tolist(),
        "temperature_intervals": intervals,
        "fit": _metrics(fit_rows, temperatures, shared, options, offset),
        "held_out": None if judge is None else _metrics(judge, temperatures, shared, options, offset),
        "cross_validation": cross_validate(usable, folds, options) if folds else None,
    }


def cross_validate(table: RoundTable, folds: int, options: CalibrationOptions) -> dict[str, Any]:
    """METRICS over all rounds, each judged with temperatures that were fitted on prompts of other folds."""
    prompts = np.unique(table.prompt)
    if not 2 <= folds <= len(prompts):
        raise ConfigError(f"folds is {folds}: it is 2 to the number of prompts ({len(prompts)}), or 0 for none")
    z, labels = _arrays(table)
    temperatures, shared, offsets = np.ones_like(z), np.ones((len(z), 1)), np.zeros((len(z), 1))
    shuffled = np.random.default_rng(options.seed).permutation(prompts)
    for fold in np.array_split(shuffled, folds):
        judged = np.isin(table.prompt, fold)
        others, y = z[~judged], labels[~judged]
        offset = fit_offset(others, y, options) if options.offset else 0.0
        offsets[judged] = offset
        temperatures[judged] = fit_sts(others + offset, y, options).temperatures
        shared[judged] = fit_shared_temperature(others + offset, y, options)
    return {"folds": folds} | _metrics(table, temperatures, shared, options, offsets)


def split_prompts(table: RoundTable, share: float, seed: int) -> tuple[RoundTable, RoundTable | None]:
    """Rounds to fit and rounds to judge on, no prompt in both."""
    if not 0.0 <= share < 1.0:
        raise ConfigError(f"held_out_share is {share}: it is a share of the prompts below 1")
    if share == 0.0:
        return table, None
    prompts = np.unique(table.prompt)
    if len(prompts) < 2:
        raise DataError("the rounds come from one prompt: record more, or keep none out (held_out_share 0)")
    shuffled = np.random.default_rng(seed).permutation(prompts)
    kept_out = shuffled[: min(max(round(share * len(prompts)), 1), len(prompts) - 1)]
    judge = np.isin(table.prompt, kept_out)
    return table.select(~judge), table.select(judge)


def calibration_section(report: Mapping[str, Any]) -> CalibrationSection:
    """The part of a report that goes into ``scheduler.json``; ECE from the held-out prompts where there are some."""
    judged = report["held_out"] or report["fit"]
    return CalibrationSection(
        temperatures=tuple(report["temperatures"]),
        shared_temperature=report["shared_temperature"],
        offset=report["offset"],
        prior=tuple(report["prior"]),
        ece_before=tuple(slot["ece"]["before"] for slot in judged["slots"]),
        ece_after=tuple(slot["ece"]["after"] for slot in judged["slots"]),
        num_rounds=report["fit"]["rounds"],
        dataset=report["dataset"],
    )


def write_report(report: Mapping[str, Any], path: str | Path) -> Path:
    """Write any report of this room as JSON."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def _arrays(table: RoundTable) -> tuple[FloatArray, NDArray[np.bool_]]:
    assert table.confidence_logits is not None
    return table.confidence_logits, table.accept_prefix()


def _bootstrap(table: RoundTable, options: CalibrationOptions, statistic: Callable[[FloatArray], Any]) -> FloatArray:
    """Statistic under resampled prompts: [bootstrap, ...]."""
    _, index = np.unique(table.prompt, return_inverse=True)
    count = int(index.max()) + 1
    if count < 2:
        index, count = np.arange(len(table)), len(table)
    rng = np.random.default_rng(options.seed)
    draws = []
    for _ in range(options.bootstrap):
        weight = np.bincount(rng.integers(0, count, count), minlength=count).astype(np.float64)[index]
        draws.append(statistic(weight))
    return np.array(draws)


def _interval(draws: FloatArray, options: CalibrationOptions) -> FloatArray:
    """Lower and upper quantile: [2, ...]."""
    tail = (1.0 - options.interval) / 2.0
    return np.quantile(draws, [tail, 1.0 - tail], axis=0)


def _metrics(
    table: RoundTable,
    temperatures: FloatArray,
    shared: float | FloatArray,
    options: CalibrationOptions,
    offset: float | FloatArray = 0.0,
) -> dict[str, Any]:
    """METRICS for temperatures [G], or [N, G] where rounds have their own; shared and offset likewise."""
    z, labels = _arrays(table)
    gamma = z.shape[1]
    predicted = {
        "before": survival(z),
        "after": survival((z + offset) / temperatures),
        "shared": survival((z + offset) / shared),
    }

    def errors(weight: FloatArray | None = None) -> FloatArray:
        return np.array(
            [[ece(a[:, k], labels[:, k], options.binning, weight) for k in range(gamma)] for a in predicted.values()]
        )

    point = errors()
    interval = _interval(_bootstrap(table, options, errors), options) if options.bootstrap else None
    means = None
    if options.bootstrap:
        means = _interval(_bootstrap(table, options, lambda weight: errors(weight).mean(axis=1)), options)
    names = list(predicted)
    slots = []
    calibrated = (z + offset) / temperatures
    for k in range(gamma):
        before, after, y = predicted["before"][:, k], predicted["after"][:, k], labels[:, k]
        reached = labels[:, k - 1] if k else np.ones(len(y), dtype=bool)
        own = z[reached, k]
        slots.append(
            {
                "slot": k,
                "survival": float(y.mean()),
                "noise_floor": ece_noise_floor(after, options.binning),
                "ece": {name: float(point[i, k]) for i, name in enumerate(names)},
                "ece_interval": None
                if interval is None
                else {name: interval[:, i, k].tolist() for i, name in enumerate(names)},
                "auc": {"before": auc(before, y), "after": auc(after, y)},
                "auc_conditional": {
                    "before": auc(sigmoid(own), y[reached]),
                    "after": auc(sigmoid(calibrated[reached, k]), y[reached]),
                },
                "brier": {name: brier(a[:, k], y) for name, a in predicted.items()},
                "reliability": {
                    "before": reliability_bins(before, y, options.binning),
                    "after": reliability_bins(after, y, options.binning),
                },
            }
        )
    return {
        "rounds": len(table),
        "prompts": len(np.unique(table.prompt)),
        "mean_ece": {name: float(point[i].mean()) for i, name in enumerate(names)},
        "mean_ece_interval": None if means is None else {name: means[:, i].tolist() for i, name in enumerate(names)},
        "slots": slots,
    }
