"""Checks of the scheduler and calibration cases: each returns rows (name, max abs difference, verdict)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from modelopt_spec.scheduling.calibration import CalibrationOptions, fit_sts, survival, temperature_grid
from modelopt_spec.scheduling.cost import CostTable
from modelopt_spec.scheduling.metrics import Binning
from modelopt_spec.scheduling.prefix_scheduler import allocate, early_stop_budget, global_budget, schedulable
from modelopt_spec.scheduling.prefix_scheduler_reference import (
    ReferenceAllocation,
    candidates,
    early_stop_reference,
    global_argmax_reference,
)

TOLERANCE = 1e-12


class Row(NamedTuple):
    """One compared quantity."""

    name: str
    difference: float
    ok: bool


def check_golden(case: Mapping[str, Any]) -> list[Row]:
    """Run a case of kind ``scheduler`` or ``sts``."""
    kind = case.get("kind")
    if kind == "scheduler":
        return [row for one in case["cases"] for row in _check_scheduler(one)]
    if kind == "sts":
        return _check_sts(case)
    raise ValueError(f"case kind {kind!r} is not one of 'scheduler', 'sts'")


def _close(name: str, got: Any, want: Any, tolerance: float = TOLERANCE) -> Row:
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    if got.shape != want.shape:
        return Row(f"{name} (shape {got.shape} against {want.shape})", float("inf"), False)
    difference = float(np.abs(got - want).max()) if got.size else 0.0
    return Row(name, difference, difference <= tolerance)


def _equal(name: str, got: Any, want: Any) -> Row:
    return _close(name, got, want, 0.0)


def cost_of(sps: Mapping[str, Any]) -> CostTable:
    """Cost table of a case's ``sps`` section."""
    if sps["kind"] == "dense":
        return CostTable.dense(sps["sps"])
    return CostTable(tuple(sps["batch_tokens"]), tuple(sps["steps_per_sec"]), sps["kind"])


def _check_scheduler(case: Mapping[str, Any]) -> list[Row]:
    name = case["name"]
    cost = cost_of(case["sps"])
    if case["confidence_logits"] is not None:
        a = survival(np.asarray(case["confidence_logits"]), case["temperatures"])
    else:
        a = np.cumprod(np.asarray(case["confidence"]), axis=1)
    rows = [_close(f"{name}.survival", a, case["survival"])]
    order = [[r, j] for r, j, _ in candidates(a.tolist())]
    rows.append(_equal(f"{name}.admission_order", order, case["admission_order"]))

    def sps(tokens: int) -> float:
        return float(cost.steps_per_second(0, tokens))

    for key, plain, vectorised in (
        ("early_stop", early_stop_reference, early_stop_budget),
        ("global_argmax", global_argmax_reference, global_budget),
    ):
        want = case[key]
        reference = plain(a.tolist(), sps)
        budget = vectorised(a, cost)
        rows += [
            _equal(f"{name}.{key}.lengths", allocate(a, budget.draft_tokens), want["lengths"]),
            _close(f"{name}.{key}.theta", budget.theta, want["theta"]),
            _equal(f"{name}.{key}.batch_tokens", budget.batch_tokens, want["batch_tokens"]),
            _equal(f"{name}.{key}.reference.lengths", reference.lengths, want["lengths"]),
            _close(f"{name}.{key}.reference.trace", _trace(reference), want["trace"]),
        ]
        if "stopped_after_candidates" in want:
            stops = [-1 if s is None else s for s in (budget.stopped_after, reference.stopped_after)]
            wanted = -1 if want["stopped_after_candidates"] is None else want["stopped_after_candidates"]
            rows.append(_equal(f"{name}.{key}.stopped_after", stops, [wanted, wanted]))
            rows.append(_close(f"{name}.{key}.tau", budget.tau, want["expected_accepts"]))
    floor = case["global_argmax_survival_eps_1e-6"]
    kept = schedulable(a, floor=1e-6)
    budget = global_budget(kept, cost)
    rows.append(_equal(f"{name}.floor.lengths", allocate(kept, budget.draft_tokens), floor["lengths"]))
    rows.append(_close(f"{name}.floor.theta", budget.theta, floor["theta"]))
    rows.append(_close(f"{name}.brute_force_theta", global_budget(a, cost).theta, case["brute_force_theta"]))
    return rows


def _trace(reference: ReferenceAllocation) -> Sequence[Sequence[float]]:
    return [[s.admitted, s.request, s.position, s.batch_tokens, s.tau, s.theta] for s in reference.trace]


def _check_sts(case: Mapping[str, Any]) -> list[Row]:
    logits = np.asarray(case["confidence_logits"])
    prefix = np.asarray(case["accept_prefix"])
    rows = [_equal("grid", temperature_grid(), case["grid"])]
    for bins, want in case["results"].items():
        fit = fit_sts(logits, prefix, CalibrationOptions(binning=Binning(int(bins))))
        rows += [
            _equal(f"{bins} bins.temperatures", fit.temperatures, want["temperatures"]),
            _equal(f"{bins} bins.grid_index", fit.grid_index, want["grid_index"]),
            _close(f"{bins} bins.ece_before", fit.ece_before, want["ece_before"]),
            _close(f"{bins} bins.ece_after", fit.ece_after, want["ece_after"]),
            _close(f"{bins} bins.ece_curve", fit.ece_curve, want["ece_curve"]),
        ]
    return rows
