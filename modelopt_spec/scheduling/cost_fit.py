"""Fit cost tables to measured step times.

Legend: C measured cells (requests R, batch tokens M, context length, seconds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelopt_spec.errors import DataError
from modelopt_spec.scheduling.cost import AdditiveCostTable, CostProfile, CostTable

__all__ = [
    "Cell",
    "FitQuality",
    "check_connected",
    "fit_additive",
    "fit_one_axis",
    "fit_profile",
    "isotonic",
    "read_cells",
]

FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Cell:
    """One measured point: median seconds of a step with R requests and M batch tokens."""

    requests: int
    tokens: int
    context: int
    seconds: float
    draft_seconds: float = 0.0
    """Seconds of ``seconds`` that were drafting."""

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


@dataclass(frozen=True)
class FitQuality:
    """How far the fitted table is from the cells, relative to the measured times."""

    rms: float
    worst: float
    cells: int

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def read_cells(rows: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Cells from their JSON form."""
    return [Cell(**{key: row[key] for key in Cell.__dataclass_fields__ if key in row}) for row in rows]


def isotonic(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Weighted least-squares non-decreasing fit (pool adjacent violators): [n], [n] -> [n]."""
    means: list[float] = []
    mass: list[float] = []
    length: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist()):
        means.append(value)
        mass.append(weight)
        length.append(1)
        while len(means) > 1 and means[-2] >= means[-1]:
            total = mass[-2] + mass[-1]
            means[-2] = (means[-2] * mass[-2] + means[-1] * mass[-1]) / total
            mass[-2] = total
            length[-2] += length[-1]
            del means[-1], mass[-1], length[-1]
    return np.repeat(np.asarray(means), length)


def fit_one_axis(cells: Sequence[Cell]) -> tuple[CostTable, FitQuality]:
    """Staircase over batch tokens: median time of each token count, made non-decreasing.

    Cells of different request counts at the same tokens are pooled, so this suits engines whose step time depends on
    the tokens alone.
    """
    _check_cells(cells)
    tokens = np.array([cell.tokens for cell in cells])
    seconds = np.array([cell.seconds for cell in cells])
    knots = np.unique(tokens)
    medians = np.array([np.median(seconds[tokens == knot]) for knot in knots])
    counts = np.array([float((tokens == knot).sum()) for knot in knots])
    times = isotonic(medians, counts / medians**2)
    table = CostTable(tuple(knots.tolist()), tuple((1.0 / times).tolist()))
    predicted = times[np.searchsorted(knots, tokens)]
    return table, _quality(predicted, seconds)


def fit_additive(cells: Sequence[Cell], *, max_sweeps: int = 5000) -> tuple[AdditiveCostTable, FitQuality]:
    """Fit ``T(R, M) = bias + alpha(R) + theta(M)`` to cells of one context length.

    Minimises the squared relative error over free alpha and non-decreasing theta by alternating exact updates (a convex
    problem). A constant can be moved between the three terms without changing T: theta starts at 0 and alpha has its
    minimum at 0, which leaves the rest as bias. Cliffs survive: neighbouring probes may differ by any amount.

    Raises:
        DataError: token counts are not shared between request counts, so that alpha and theta cannot be told apart.
    """
    _check_cells(cells)
    if len({cell.context for cell in cells}) > 1:
        raise DataError("cells of several context lengths: fit each context by itself (fit_profile)")
    requests, r = np.unique([cell.requests for cell in cells], return_inverse=True)
    tokens, m = np.unique([cell.tokens for cell in cells], return_inverse=True)
    check_connected([(cell.requests, cell.tokens) for cell in cells])
    seconds = np.array([cell.seconds for cell in cells])
    weight = 1.0 / seconds**2
    mass_r = np.bincount(r, weights=weight).astype(np.float64)
    mass_m = np.bincount(m, weights=weight).astype(np.float64)
    theta = np.zeros(len(tokens))
    alpha = np.zeros(len(requests))
    for _ in range(max_sweeps):
        new_alpha = np.bincount(r, weights=weight * (seconds - theta[m])) / mass_r
        new_theta = isotonic(np.bincount(m, weights=weight * (seconds - new_alpha[r])) / mass_m, mass_m)
        new_alpha, new_theta = new_alpha + new_theta[0], new_theta - new_theta[0]
        change = max(np.abs(new_alpha - alpha).max(), np.abs(new_theta - theta).max())
        alpha, theta = new_alpha, new_theta
        if change < 1e-7 * float(seconds.min()):
            break
    bias = max(float(alpha.min()), 0.0)
    draft = np.bincount(r, weights=[cell.draft_seconds for cell in cells]) / np.bincount(r)
    table = AdditiveCostTable(
        bias_seconds=bias,
        request_probes=tuple(requests.tolist()),
        alpha_seconds=tuple(np.maximum(alpha - bias, 0.0).tolist()),
        token_probes=tuple(tokens.tolist()),
        theta_seconds=tuple(theta.tolist()),
        draft_seconds=tuple(draft.tolist()) if draft.any() else None,
        plain_seconds=_plain(cells, requests.tolist()),
    )
    predicted = table.bias_seconds + np.asarray(table.alpha_seconds)[r] + theta[m]
    return table, _quality(predicted, seconds)


def _plain(cells: Sequence[Cell], requests: Sequence[int]) -> tuple[float, ...] | None:
    """Time of one token a request without drafting at each request count; None where one was not measured.

    Taken from the cells as they are: a kernel for single tokens may be slower than one for two, and a table whose theta
    never falls cannot say so.
    """
    found = [[c.seconds - c.draft_seconds for c in cells if c.requests == c.tokens == count] for count in requests]
    if not all(found) or not any(cell.draft_seconds for cell in cells):
        return None
    return tuple(max(float(np.median(times)), 1e-9) for times in found)


def fit_profile(cells: Sequence[Cell]) -> tuple[CostProfile, list[FitQuality]]:
    """One additive table for each measured context length."""
    contexts = sorted({cell.context for cell in cells})
    fits = [fit_additive([cell for cell in cells if cell.context == context]) for context in contexts]
    return CostProfile(tuple(contexts), tuple(table for table, _ in fits)), [quality for _, quality in fits]


def _check_cells(cells: Sequence[Cell]) -> None:
    if not cells:
        raise DataError("no measured cell: a cost table needs measurements")
    for cell in cells:
        if not np.isfinite(cell.seconds) or cell.seconds <= 0:
            raise DataError(
                f"time of {cell.requests} requests, {cell.tokens} tokens is {cell.seconds}: it must be positive"
            )
        if not 1 <= cell.requests <= cell.tokens:
            raise DataError(
                f"cell of {cell.requests} requests and {cell.tokens} batch tokens: a request sends at least one"
            )


def check_connected(cells: Sequence[tuple[int, int]]) -> None:
    """Every request count must be linked to every other through shared token counts: (requests, tokens) pairs."""
    requests, r = np.unique([pair[0] for pair in cells], return_inverse=True)
    tokens, m = np.unique([pair[1] for pair in cells], return_inverse=True)
    reached = {int(r[0])}
    while True:
        linked_tokens = np.isin(m, m[np.isin(r, list(reached))])
        more = {int(i) for i in r[linked_tokens]}
        if more == reached:
            break
        reached = more
    if len(reached) < len(requests):
        apart = [int(requests[i]) for i in range(len(requests)) if i not in reached]
        raise DataError(
            f"request counts {apart} share no token count with the others (tokens {tokens.tolist()}): alpha and theta "
            "cannot be told apart. Add request counts in between, so that batch tokens recur"
        )


def _quality(predicted: FloatArray, measured: FloatArray) -> FitQuality:
    error = predicted / measured - 1.0
    return FitQuality(float(np.sqrt((error**2).mean())), float(np.abs(error).max()), len(error))
