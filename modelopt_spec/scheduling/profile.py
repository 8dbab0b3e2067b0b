"""From timed steps to a cost table that may be shipped.

The report (JSON, ``mtsp profile`` writes it)::

    {"kind": "mtsp.cost_profile", "version": 1, "gamma": G, "measurements": see cost_measure.py,
     "cost": a cost table (see cost.py), "quality": [{"rms", "worst", "cells"}] one a context,
     "hardware": str}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.cost import AdditiveCostTable, CostProfile, CostTable, check_informative, cost_from_dict
from modelopt_spec.scheduling.cost_fit import Cell, FitQuality, fit_one_axis, fit_profile, read_cells
from modelopt_spec.scheduling.cost_measure import (
    MEASUREMENTS_KIND,
    CostMeasurements,
    DraftFunction,
    StepFunction,
    measure_cost,
)
from modelopt_spec.scheduling.engine_tables import read_engine_cost
from modelopt_spec.scheduling.scheduler_file import current_hardware
from modelopt_spec.text_files import read_text

__all__ = ["PROFILE_KIND", "fit_measurements", "profile_cost", "read_cost"]

PROFILE_KIND = "mtsp.cost_profile"

Cost = CostTable | AdditiveCostTable | CostProfile


def profile_cost(
    step_fn: StepFunction,
    *,
    requests: Sequence[int],
    gamma: int,
    contexts: Sequence[int] = (512,),
    draft_fn: DraftFunction | None = None,
    hardware: str | None = None,
    check: bool = True,
    **measure: Any,
) -> dict[str, Any]:
    """Measure, fit and check; returns the report of the module's docstring.

    Args:
        step_fn: see :func:`modelopt_spec.scheduling.cost_measure.measure_cost`, as are ``requests``, ``gamma``,
            ``contexts`` and ``draft_fn``.
        requests: batch sizes.
        gamma: draft tokens of a full block.
        contexts: cached tokens a request.
        draft_fn: one draft pass.
        hardware: name of the machine; default this one's.
        check: refuse a flat or inert table.
        measure: further arguments of ``measure_cost``.
    """
    measured = measure_cost(step_fn, requests=requests, gamma=gamma, contexts=contexts, draft_fn=draft_fn, **measure)
    return fit_measurements(measured, hardware=hardware, check=check)


def fit_measurements(
    measured: CostMeasurements, *, hardware: str | None = None, check: bool = True, axes: int = 2
) -> dict[str, Any]:
    """Fit measured cells: two axes for each context length, or one staircase over tokens (one context only)."""
    cost, quality = _fit(measured.cells, axes)
    if check:
        _check(cost, measured)
    return {
        "kind": PROFILE_KIND,
        "version": 1,
        "gamma": measured.gamma,
        "measurements": measured.to_dict(),
        "cost": cost.to_dict(),
        "quality": [one.to_dict() for one in quality],
        "hardware": hardware or current_hardware(),
    }


def _fit(cells: Sequence[Cell], axes: int) -> tuple[Cost, list[FitQuality]]:
    if axes == 2:
        profile, qualities = fit_profile(cells)
        return (profile if len(profile.tables) > 1 else profile.tables[0]), qualities
    if axes != 1:
        raise ConfigError(f"axes is {axes}: a cost table has 1 or 2")
    if len({cell.context for cell in cells}) > 1:
        raise ConfigError("axes is 1, but several context lengths were measured: fit two axes, or keep one context")
    table, quality = fit_one_axis(cells)
    return table, [quality]


def _check(cost: Cost, measured: CostMeasurements) -> None:
    """At least one measured context must tell the scheduler something."""
    counts = sorted({cell.requests for cell in measured.cells})
    problems: list[DataError] = []
    contexts = sorted({cell.context for cell in measured.cells})
    for context in contexts:
        try:
            check_informative(cost, gamma=measured.gamma, requests=counts, context=context)
        except DataError as error:
            problems.append(error)
    if len(problems) == len(contexts):
        raise problems[0]


def read_cost(path: str | Path) -> Cost:
    """A cost table from any file that holds one: our profile, measurements or scheduler file, or an engine's table."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"cost table {path} does not exist")
    try:
        data = json.loads(read_text(path, "a cost table (JSON, or an engine's)"))
    except json.JSONDecodeError:
        return read_engine_cost(path).cost
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == MEASUREMENTS_KIND:
        return _fit(_cells(data), 2)[0]
    if kind in (PROFILE_KIND, "mtsp.scheduler"):
        if not data.get("cost"):
            raise DataError(f"{path} has no cost table: profile this machine first")
        return cost_from_dict(data["cost"])
    if kind is not None:
        return cost_from_dict(data)
    return read_engine_cost(path).cost


def _cells(data: Mapping[str, Any]) -> list[Cell]:
    return read_cells(data["cells"])
