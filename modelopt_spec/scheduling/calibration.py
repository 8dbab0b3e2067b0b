"""Sequential temperature scaling (STS) of confidences, DSpark paper section 3.2.

Legend: N rounds, G slots of a block (gamma), M temperatures on the grid.

The confidence of slot k is ``c_k = sigmoid(z_k / T_k)``, the survival of the first k+1 draft tokens is
``a_k = c_0 c_1 ... c_k``. Slots are fitted left to right: T_k minimises the expected calibration error of ``a_k``
against "the first k+1 draft tokens were all accepted", with T_0 .. T_{k-1} already fixed. Temperatures are positive, so
within a slot the order of confidences never changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.metrics import Binning, ece, ece_grid, ece_noise_floor

__all__ = [
    "Calibration",
    "CalibrationOptions",
    "check_enough_rounds",
    "check_temperatures",
    "fit_offset",
    "fit_shared_temperature",
    "fit_sts",
    "sigmoid",
    "survival",
    "temperature_grid",
]

FloatArray = NDArray[np.floating[Any]]

_OFFSETS = np.linspace(-2.0, 2.0, 17)
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class CalibrationOptions:
    """Settings of the fit; the defaults are those of the published fitting scripts."""

    binning: Binning = field(default_factory=Binning)
    grid_points: int = 41
    lowest: float = 0.1
    highest: float = 10.0
    refine: bool = False
    """Golden-section search in log T between the neighbours of the best grid point."""
    offset: bool = False
    """Fit one number that is added to all logits, too (see :func:`fit_offset`)."""
    bootstrap: int = 100
    """Replicates for the intervals (prompts are drawn with replacement); 0 for none."""
    interval: float = 0.95
    max_noise: float = 0.04
    """Refuse when an ECE of perfectly calibrated confidences would still read higher than this."""
    min_events: int = 10
    """Refuse when a slot saw fewer accepted, or fewer rejected, prefixes than this."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.grid_points < 2:
            raise ConfigError(f"grid_points is {self.grid_points}: the temperature grid needs at least 2")
        if not 0 < self.lowest < self.highest:
            raise ConfigError(f"temperature range {self.lowest} .. {self.highest}: it must be positive and ascending")
        if not 0 < self.interval < 1:
            raise ConfigError(f"interval is {self.interval}: it is a probability, for example 0.95")


@dataclass(frozen=True)
class Calibration:
    """Fitted temperatures and their ECE on the rounds of the fit."""

    temperatures: tuple[float, ...]
    """[G]"""
    grid_index: tuple[int, ...]
    """[G] best point of the grid (before refinement)."""
    ece_before: tuple[float, ...]
    """[G] at T = 1 in every slot."""
    ece_after: tuple[float, ...]
    """[G] with the fitted temperatures."""
    ece_curve: tuple[tuple[float, ...], ...]
    """[G, M] ECE at each grid point, earlier slots fitted."""


def temperature_grid(points: int = 41, lowest: float = 0.1, highest: float = 10.0) -> FloatArray:
    """Log-spaced temperatures [M]; with the defaults the middle one is exactly 1."""
    low, high = math.log10(lowest), math.log10(highest)
    return np.array([10.0 ** (low + (high - low) * i / (points - 1)) for i in range(points)])


def sigmoid(z: FloatArray) -> FloatArray:
    """``1 / (1 + exp(-z))`` without overflow."""
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, e) / (1.0 + e)


def check_temperatures(temperatures: Any, gamma: int) -> FloatArray:
    """Validate G positive finite temperatures: [G] float64."""
    values = np.asarray(temperatures, dtype=np.float64)
    if values.shape != (gamma,):
        raise ConfigError(
            f"temperatures has {values.size} entries, but a block of this drafter has {gamma} slots: calibrate with "
            f"gamma {gamma}"
        )
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"temperatures {values.tolist()} must all be positive and finite: calibrate again")
    return values


def survival(logits: FloatArray, temperatures: Any = None) -> FloatArray:
    """Running product of ``sigmoid(logits / T)`` along the slots: logits [..., G] -> [..., G]."""
    z = np.asarray(logits, dtype=np.float64)
    if temperatures is not None:
        z = z / check_temperatures(temperatures, z.shape[-1])
    return np.cumprod(sigmoid(z), axis=-1)


def check_enough_rounds(logits: FloatArray, accepted_prefix: NDArray[Any], options: CalibrationOptions) -> None:
    """Refuse to fit where the rounds cannot tell; DataError says how many are needed.

    Two rules per slot: the noise floor of its ECE stays below ``max_noise`` (it falls with 1/sqrt(N)), and the slot saw
    at least ``min_events`` accepted and rejected prefixes.
    """
    rounds, gamma = logits.shape
    predicted = survival(logits)
    needed, reason = rounds, ""
    for k in range(gamma):
        floor = ece_noise_floor(predicted[:, k], options.binning)
        by_noise = math.ceil(rounds * (floor / options.max_noise) ** 2)
        if by_noise > needed:
            needed, reason = by_noise, f"the ECE of slot {k} is only known to {floor:.3f}"
        accepted = int(accepted_prefix[:, k].sum())
        for count, what in ((accepted, "accepted"), (rounds - accepted, "rejected")):
            if count >= options.min_events:
                continue
            if count == 0:
                raise DataError(
                    f"slot {k} was {what} in none of {rounds} rounds: its confidence cannot be calibrated. Collect "
                    f"more rounds (at least {options.min_events} such events), or use fewer draft tokens "
                    "(num_draft_tokens)"
                )
            by_events = math.ceil(rounds * options.min_events / count)
            if by_events > needed:
                needed, reason = by_events, f"slot {k} was {what} in only {count} rounds"
    if needed > rounds:
        raise DataError(
            f"{rounds} rounds are too few to calibrate: {reason}. About {needed} rounds are needed (max_noise "
            f"{options.max_noise}, min_events {options.min_events})"
        )


def fit_sts(
    logits: FloatArray,
    accepted_prefix: NDArray[Any],
    options: CalibrationOptions | None = None,
    *,
    weight: FloatArray | None = None,
) -> Calibration:
    """Fit one temperature a slot, left to right.

    Args:
        logits: [N, G] confidence logits.
        accepted_prefix: [N, G] 0/1, the first k+1 draft tokens were all accepted.
        options: grid, bins and refinement.
        weight: [N] how often a round counts (bootstrap replicates).

    The lowest ECE on the grid wins, ties go to the smaller temperature.
    """
    options = options or CalibrationOptions()
    z, labels = _check_rounds(logits, accepted_prefix)
    grid = temperature_grid(options.grid_points, options.lowest, options.highest)
    before = survival(z)
    prefix = np.ones(len(z))
    temperatures: list[float] = []
    indices: list[int] = []
    after: list[float] = []
    curves: list[tuple[float, ...]] = []
    for k in range(z.shape[1]):
        column, label, reached = z[:, k], labels[:, k], prefix
        curve = ece_grid(reached[None, :] * sigmoid(column[None, :] / grid[:, None]), label, options.binning, weight)
        best = int(np.argmin(curve))
        temperature, value = float(grid[best]), float(curve[best])
        if options.refine:

            def objective(
                log_t: float, z: FloatArray = column, y: FloatArray = label, r: FloatArray = reached
            ) -> float:
                return ece(r * sigmoid(z / math.exp(log_t)), y, options.binning, weight)

            low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
            refined, found = golden_section(objective, math.log(low), math.log(high))
            if found < value:
                temperature, value = math.exp(refined), found
        prefix = prefix * sigmoid(column / temperature)
        temperatures.append(temperature)
        indices.append(best)
        after.append(value)
        curves.append(tuple(curve.tolist()))
    return Calibration(
        temperatures=tuple(temperatures),
        grid_index=tuple(indices),
        ece_before=tuple(ece(before[:, k], labels[:, k], options.binning, weight) for k in range(z.shape[1])),
        ece_after=tuple(after),
        ece_curve=tuple(curves),
    )


def fit_shared_temperature(
    logits: FloatArray,
    accepted_prefix: NDArray[Any],
    options: CalibrationOptions | None = None,
    *,
    weight: FloatArray | None = None,
) -> float:
    """One temperature for all slots, for engines that take a single one: least mean ECE of survival over the slots."""
    options = options or CalibrationOptions()
    z, labels = _check_rounds(logits, accepted_prefix)
    grid = temperature_grid(options.grid_points, options.lowest, options.highest)
    running = np.ones((len(grid), len(z)))
    total = np.zeros(len(grid))
    for k in range(z.shape[1]):
        running *= sigmoid(z[None, :, k] / grid[:, None])
        total += ece_grid(running, labels[:, k], options.binning, weight)
    best = int(np.argmin(total))
    if not options.refine:
        return float(grid[best])

    def objective(log_t: float) -> float:
        a = survival(z / math.exp(log_t))
        return sum(ece(a[:, k], labels[:, k], options.binning, weight) for k in range(z.shape[1]))

    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    refined, found = golden_section(objective, math.log(low), math.log(high))
    return math.exp(refined) if found < total[best] else float(grid[best])


def fit_offset(logits: FloatArray, accepted_prefix: NDArray[Any], options: CalibrationOptions | None = None) -> float:
    """One number added to every logit before the temperatures divide it: least mean ECE after fitting those.

    A temperature pulls a confidence towards 0.5. A drafter that is accepted one time in five is overconfident around a
    much lower centre; the offset moves that centre to where the temperatures pull. It is a change of the confidence
    layer's bias, so an export can carry it to any engine, and as all logits are moved alike it changes no order either.
    """
    options = options or CalibrationOptions()
    z, labels = _check_rounds(logits, accepted_prefix)
    coarse = replace(options, refine=False, offset=False)

    def error(offset: float) -> float:
        return float(np.mean(fit_sts(z + offset, labels, coarse).ece_after))

    scores = [(error(offset), abs(offset), offset) for offset in _OFFSETS.tolist()]
    return min(scores)[2]


def golden_section(
    objective: Callable[[float], float], low: float, high: float, tolerance: float = 1e-3
) -> tuple[float, float]:
    """Minimise over [low, high]; returns (x, objective(x)) of the best point seen.

    An ECE is a step-like function of T, so this is a local search: callers keep its result only if it beats the grid.
    """
    a, b = low, high
    x1, x2 = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
    f1, f2 = objective(x1), objective(x2)
    best = min((f1, x1), (f2, x2))
    while b - a > tolerance:
        if f1 <= f2:
            b, x2, f2 = x2, x1, f1
            x1 = b - _GOLDEN * (b - a)
            f1 = objective(x1)
            best = min(best, (f1, x1))
        else:
            a, x1, f1 = x1, x2, f2
            x2 = a + _GOLDEN * (b - a)
            f2 = objective(x2)
            best = min(best, (f2, x2))
    return best[1], best[0]


def _check_rounds(logits: FloatArray, accepted_prefix: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    z = np.asarray(logits, dtype=np.float64)
    labels = np.asarray(accepted_prefix, dtype=np.float64)
    if z.ndim != 2 or z.shape != labels.shape or not z.size:
        raise DataError(
            f"confidence logits {z.shape} and accepted prefixes {labels.shape} must be [rounds, slots], not empty"
        )
    if np.isnan(z).any():
        row, slot = np.argwhere(np.isnan(z))[0]
        raise DataError(f"confidence logit of round {row}, slot {slot} is NaN: the drafter's confidence head is broken")
    if (np.diff(labels, axis=1) > 0).any():
        row = int(np.argwhere(np.diff(labels, axis=1) > 0)[0][0])
        raise DataError(f"accepted prefix of round {row}, {labels[row].tolist()}, accepts a token after a rejection")
    return z, labels
