"""How far would more training get: accepted length against tokens, extrapolated from the curve of a shorter run.

Two laws of the tokens n seen are fitted, because a short curve does not tell which one holds:

    power    tau(n) = ceiling - gain * (n / n_mid)^-exponent            1 <= ceiling <= K + 1,  gain >= 0
    rise     tau(n) = 1 + (ceiling - 1) / (1 + (half / n)^exponent)     1 <= ceiling <= K + 1

The first only flattens, the second begins slowly, as drafters do. For each point of a grid the rest follows from least
squares, so both fits need no start. The interval pools both laws over a block bootstrap: residuals of neighbouring
points depend on each other, so they are drawn in runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelopt_spec.errors import DataError

__all__ = ["Fit", "Rise", "curve_of", "fit_rise", "fit_tau", "forecast"]

EXPONENTS = np.linspace(0.05, 2.0, 79)
RISE_EXPONENTS = np.linspace(0.25, 4.0, 31)
MIN_POINTS, MOST_POINTS = 8, 200


@dataclass(frozen=True)
class Fit:
    """A fitted power law."""

    ceiling: float
    """Accepted length that it approaches."""
    gain: float
    """Distance from the ceiling at ``n_mid`` tokens."""
    exponent: float
    n_mid: float

    def __call__(self, tokens: Any) -> Any:
        """tau at a number of tokens, or at an array of them."""
        return self.ceiling - self.gain * (np.asarray(tokens, dtype=float) / self.n_mid) ** -self.exponent


@dataclass(frozen=True)
class Rise:
    """A fitted rise from 1."""

    ceiling: float
    half: float
    """Tokens at half of the way."""
    exponent: float

    def __call__(self, tokens: Any) -> Any:
        """tau at a number of tokens, or at an array of them."""
        return 1 + (self.ceiling - 1) / (1 + (self.half / np.asarray(tokens, dtype=float)) ** self.exponent)


def fit_tau(tokens: Sequence[float] | np.ndarray, tau: Sequence[float] | np.ndarray, *, limit: float) -> Fit:
    """Least squares fit of the saturating power law.

    Args:
        tokens: seen at each point, positive.
        tau: accepted length at each point.
        limit: largest possible value, K + 1.

    Raises:
        DataError: fewer than 3 points, or tokens that are not positive.
    """
    n, y = np.asarray(tokens, dtype=float), np.asarray(tau, dtype=float)
    if len(n) < 3 or len(n) != len(y) or not (n > 0).all():
        raise DataError(f"a fit needs 3 points or more with positive tokens, got {len(n)} and {len(y)} values")
    mid = float(np.exp(np.log(n).mean()))
    shapes = (n / mid) ** -EXPONENTS[:, None]
    ceilings, gains = _candidates(shapes, y, limit)
    errors = ((ceilings[..., None] - gains[..., None] * shapes - y) ** 2).sum(-1)
    kind, row = np.unravel_index(int(errors.argmin()), errors.shape)
    return Fit(float(ceilings[kind, row]), float(gains[kind, row]), float(EXPONENTS[row]), mid)


def fit_rise(tokens: Sequence[float] | np.ndarray, tau: np.ndarray, *, limit: float) -> list[Rise]:
    """Least squares fits of the rise to several curves over the same tokens.

    Args:
        tokens: seen at each point, positive, [n].
        tau: accepted lengths, [curves, n].
        limit: largest possible value, K + 1.
    """
    n, y = np.asarray(tokens, dtype=float), np.atleast_2d(np.asarray(tau, dtype=float)) - 1
    halves = np.geomspace(n.min() / 3, n.max() * 100, 60)
    half, exponent = (grid.ravel() for grid in np.meshgrid(halves, RISE_EXPONENTS, indexing="ij"))
    shapes = 1 / (1 + (half[:, None] / n) ** exponent[:, None])
    products, squares = y @ shapes.T, (shapes**2).sum(1)
    gains = np.clip(products / squares, 0, limit - 1)
    best = (gains**2 * squares - 2 * gains * products).argmin(1)
    return [Rise(1 + float(gains[row, at]), float(half[at]), float(exponent[at])) for row, at in enumerate(best)]


def _candidates(shapes: np.ndarray, y: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Least squares in (ceiling, gain) for each exponent's shape [E, n]: free, and on each edge of what they may be.

    Returns ceilings and gains, [4, E]; free ones outside of the edges are replaced by a constant.
    """
    flat = np.full(len(shapes), float(np.clip(y.mean(), 1, limit)))
    nothing = np.zeros(len(shapes))
    centred = shapes - shapes.mean(1, keepdims=True)
    slopes = centred @ (y - y.mean()) / np.maximum((centred**2).sum(1), 1e-30)
    free, gains = y.mean() - slopes * shapes.mean(1), -slopes
    allowed = (free >= 1) & (free <= limit) & (gains >= 0)
    edges = [np.maximum(0.0, shapes @ (edge - y) / (shapes**2).sum(1)) for edge in (1.0, limit)]
    return (
        np.stack([np.where(allowed, free, flat), nothing + 1.0, nothing + limit, flat]),
        np.stack([np.where(allowed, gains, nothing), *edges, nothing]),
    )


def curve_of(report: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, str]:
    """Tokens seen, accepted length and the name of the value, from a training report.

    Held-out values (``eval_tau``) are taken where there are enough of them, else those of the training batches.
    """
    data, curves = report["data"]["train"], report["curves"]
    rows_per_step = report.get("rows_per_step", 1)
    a_row = data["tokens"] / max(1, data["samples"])
    for name in ("eval_tau", "tau"):
        points = [(entry["step"] * rows_per_step * a_row, entry[name]) for entry in curves if name in entry]
        if len(points) >= MIN_POINTS or name == "tau":
            tokens, tau = np.array(points, dtype=float).reshape(-1, 2).T
            return tokens, tau, name
    raise AssertionError("unreachable")


def _read_report(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no report.json of a training: {error}") from None
    if not isinstance(content, dict) or "curves" not in content:
        raise DataError(f"{path} is no report.json of a training: it has no curves")
    return content


def forecast(
    report: dict[str, Any] | str | Path,
    at_tokens: Sequence[float] | None = None,
    *,
    skip: float = 0.1,
    level: float = 0.8,
    resamples: int = 400,
    seed: int = 0,
) -> dict[str, Any]:
    """Accepted length after more tokens, with an interval, from a run's ``report.json``.

    Args:
        report: its content or path.
        at_tokens: where to look; None: twice, four times and ten times what the run saw.
        skip: share of the curve's beginning that is left out (warm-up).
        level: of the interval.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        ``laws`` (power: ceiling, gain, exponent, n_mid; rise: ceiling, half, exponent), ``noise`` (standard deviation
        of the residuals), ``metric``, ``points``, ``tokens`` (seen), ``at``: one entry each with tokens, tau (the
        median), low and high; and ``caveats``.

    Raises:
        DataError: a curve of fewer than 8 points.
    """
    content = report if isinstance(report, dict) else _read_report(Path(report))
    tokens, tau, metric = curve_of(content)
    kept = slice(int(len(tokens) * skip), None)
    n, y = tokens[kept], tau[kept]
    if len(n) < MIN_POINTS:
        raise DataError(
            f"the report's curve has {len(tokens)} points, {len(n)} after its beginning: a forecast needs "
            f"{MIN_POINTS}. Log more often (training.logging_steps) or train longer"
        )
    limit = float(content["recipe"]["drafter"].get("block_size", 7)) + 1
    wanted = np.asarray(at_tokens if at_tokens is not None else [2 * n[-1], 4 * n[-1], 10 * n[-1]], dtype=float)
    n, y = _thinned(n, y)
    generator = np.random.default_rng(seed)
    power, rise = fit_tau(n, y, limit=limit), fit_rise(n, y, limit=limit)[0]
    noisy = {law: law(n) + _resampled(y - law(n), resamples, generator) for law in (power, rise)}
    predictions = np.array(
        [fit_tau(n, curve, limit=limit)(wanted) for curve in noisy[power]]
        + [found(wanted) for found in fit_rise(n, noisy[rise], limit=limit)]
    )
    low, centre, high = np.quantile(predictions, [(1 - level) / 2, 0.5, (1 + level) / 2], axis=0)
    return {
        "kind": "modelopt_spec.forecast",
        "version": 1,
        "metric": metric,
        "points": len(tokens[kept]),
        "tokens": float(n[-1]),
        "laws": {"power": asdict(power), "rise": asdict(rise)},
        "noise": float((y - power(n)).std()),
        "level": level,
        "at": [
            {"tokens": float(t), "tau": float(c), "low": float(a), "high": float(b)}
            for t, c, a, b in zip(wanted, centre, low, high, strict=True)
        ],
        "caveats": _caveats(content, metric, float(n[-1]), float(wanted.max())),
    }


def _thinned(n: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbouring points of a long curve averaged, so that at most ``MOST_POINTS`` are left."""
    size = -(-len(n) // MOST_POINTS)
    starts = np.arange(0, len(n), size)
    counts = np.diff([*starts, len(n)])
    return np.add.reduceat(n, starts) / counts, np.add.reduceat(y, starts) / counts


def _resampled(residuals: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Runs of neighbouring residuals put together anew: [count, points]."""
    points = len(residuals)
    size = max(1, round(points**0.5))
    starts = generator.integers(0, points, size=(count, -(-points // size)))
    index = (starts[:, :, None] + np.arange(size)) % points
    return residuals[index.reshape(count, -1)[:, :points]]


def _caveats(report: dict[str, Any], metric: str, seen: float, furthest: float) -> list[str]:
    found = []
    if metric == "tau":
        found.append("measured on training batches: data.validation_share and training.eval_steps give held-out rows")
    scheduler = report["recipe"]["training"].get("lr_scheduler_type", "linear")
    if scheduler not in ("constant", "constant_with_warmup"):
        found.append(
            f"the learning rate fell to its end ({scheduler}), which lifts the curve's last part: a longer run reaches "
            "these values later in its own schedule"
        )
    data = report["data"]["train"]
    if furthest > data["tokens"]:
        found.append(
            f"{furthest / data['tokens']:.1f} passes over the same {data['tokens']:,} tokens: repeated text teaches "
            "less than new text, which the curve does not show before it happens"
        )
    if furthest > 20 * seen:
        found.append("more than 20 times the tokens of the run: the interval covers the noise, not a change of the law")
    return found
