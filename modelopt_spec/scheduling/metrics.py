"""How good predicted survivals are: ECE, reliability bins, AUC, Brier score and the noise floor of an ECE.

Legend: N rounds, b bins. ``p`` are predicted probabilities [N], ``y`` 0/1 labels [N], ``weight`` how often a round
counts [N] (bootstrap replicates).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelopt_spec.errors import ConfigError

__all__ = ["Binning", "auc", "brier", "ece", "ece_noise_floor", "reliability_bins"]

FloatArray = NDArray[np.floating[Any]]

_CLAMP = 1e-8
"""Probabilities are kept this far from 0 and 1 inside an ECE, as the published fitting scripts do."""


@dataclass(frozen=True)
class Binning:
    """How predictions are grouped: ``bins`` of equal width over [0, 1], or (adaptive) of equal count."""

    bins: int = 15
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.bins < 1:
            raise ConfigError(f"bins is {self.bins}: an ECE needs at least one bin")

    def assign(self, p: FloatArray, weight: FloatArray | None = None) -> NDArray[np.int64]:
        """Bin of each prediction: [...] -> [...] in 0 .. bins-1.

        Adaptive bins cut at the quantiles of ``p`` (of the weighted sample); equal predictions share a bin.
        """
        if not self.adaptive:
            return np.clip((p * self.bins).astype(np.int64), 0, self.bins - 1)
        order = np.argsort(p, kind="stable")
        mass = np.ones(len(p)) if weight is None else weight[order]
        reached = np.cumsum(mass)
        cuts = np.searchsorted(reached, reached[-1] * np.arange(1, self.bins) / self.bins, side="left")
        edges = p[order][np.minimum(cuts, len(p) - 1)]
        return np.searchsorted(edges, p, side="left").astype(np.int64)


def ece(p: FloatArray, y: NDArray[Any], binning: Binning, weight: FloatArray | None = None) -> float:
    """Expected calibration error ``sum_b n_b / n * |mean p - mean y|``; p [N], y [N]."""
    p = np.clip(p, _CLAMP, 1.0 - _CLAMP)
    gap, total = _bin_sums(p, y, binning, weight)[2:]
    return float(np.abs(gap).sum() / total)


def _bin_sums(
    p: FloatArray, y: NDArray[Any], binning: Binning, weight: FloatArray | None
) -> tuple[FloatArray, FloatArray, FloatArray, float]:
    """Per bin: count, sum of p, sum of p minus sum of y; and the total count."""
    index = binning.assign(p, weight)
    w = np.ones(len(p)) if weight is None else weight
    count, sum_p, sum_y = (
        np.bincount(index, weights=values, minlength=binning.bins).astype(np.float64) for values in (w, w * p, w * y)
    )
    return count, sum_p, sum_p - sum_y, float(w.sum())


def ece_grid(p: FloatArray, y: NDArray[Any], binning: Binning, weight: FloatArray | None = None) -> FloatArray:
    """ECE of M candidate predictions at once: p [M, N], y [N] -> [M]. Equal-width bins in one pass."""
    if binning.adaptive:
        return np.array([ece(row, y, binning, weight) for row in p])
    p = np.clip(p, _CLAMP, 1.0 - _CLAMP)
    rows, samples = p.shape
    index = (binning.assign(p) + np.arange(rows)[:, None] * binning.bins).ravel()
    gap = p - y[None, :]
    total = float(samples)
    if weight is not None:
        gap = gap * weight[None, :]
        total = float(weight.sum())
    sums = np.bincount(index, weights=gap.ravel(), minlength=rows * binning.bins)
    return np.abs(sums).reshape(rows, binning.bins).sum(axis=1) / total


def ece_noise_floor(p: FloatArray, binning: Binning) -> float:
    """ECE to expect from N rounds if ``p`` were exactly right: ``sum_b n_b/n * sqrt(2/pi) * sqrt(v_b / n_b)``.

    v_b is the mean of p(1-p) in the bin; a binomial mean deviates from its expectation by about sqrt(2/pi) standard
    deviations. An ECE of that size carries no information, and it falls with 1/sqrt(N).
    """
    p = np.clip(p, _CLAMP, 1.0 - _CLAMP)
    index = binning.assign(p)
    variance = np.bincount(index, weights=p * (1.0 - p), minlength=binning.bins)
    return float(np.sqrt(2.0 / np.pi) * np.sqrt(variance).sum() / len(p))


def reliability_bins(p: FloatArray, y: NDArray[Any], binning: Binning) -> list[dict[str, float]]:
    """Points of a reliability diagram: for each filled bin its count, mean prediction and observed rate."""
    count, sum_p, gap, _ = _bin_sums(np.clip(p, _CLAMP, 1.0 - _CLAMP), y, binning, None)
    filled = count > 0
    return [
        {"count": int(n), "predicted": float(s / n), "observed": float((s - g) / n)}
        for n, s, g in zip(count[filled], sum_p[filled], gap[filled])
    ]


def brier(p: FloatArray, y: NDArray[Any], weight: FloatArray | None = None) -> float:
    """Mean squared error of the probabilities."""
    return float(np.average((p - y) ** 2, weights=weight))


def auc(p: FloatArray, y: NDArray[Any], weight: FloatArray | None = None) -> float | None:
    """Probability that a positive round ranks above a negative one, ties counting half; None without both classes."""
    w = np.ones(len(p)) if weight is None else weight
    y = np.asarray(y, dtype=np.float64)
    values, index = np.unique(p, return_inverse=True)
    positive = np.bincount(index, weights=w * y, minlength=len(values))
    negative = np.bincount(index, weights=w * (1.0 - y), minlength=len(values))
    total = positive.sum() * negative.sum()
    if total == 0:
        return None
    below = np.cumsum(negative) - negative
    return float((positive * (below + 0.5 * negative)).sum() / total)
