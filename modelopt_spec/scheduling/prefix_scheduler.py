"""How many draft tokens of each request are worth verifying, vectorised over the requests of a step.

Legend: R requests of the step, G slots of a block (gamma), B batch tokens, SPS steps per second.

With survivals ``a[r, j]`` (probability that the first j+1 draft tokens of request r are all accepted) and lengths l_r,

    B = R + sum_r l_r,    tau = R + sum_r sum_{j < l_r} a[r, j],    Theta = tau * SPS(B)

Survivals fall along a request, so walking all (r, j) in falling order of ``a`` visits each request's slots in order and
gives, for any number n of admitted tokens, the lengths of largest tau. Two ways to choose n (DSpark paper):

* :func:`early_stop_budget`, Algorithm 1: stop at the first admission that does not raise Theta. Whether a token is
  verified then depends only on tokens before it, which keeps speculative sampling lossless (Appendix A).
* :func:`global_budget`, section 5.2: the best n of the whole walk. Necessary on staircases, where Theta drops at each
  cliff and rises again after it. Not lossless on the confidences of the step itself, so n is computed from confidences
  of earlier steps; :func:`allocate` then ranks the step's own survivals, and a rank only depends on earlier tokens.

Candidates have positive survival; ties go to the earlier slot, then to the earlier request.
:mod:`modelopt_spec.scheduling.prefix_scheduler_reference` says the same with loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelopt_spec.errors import DataError
from modelopt_spec.scheduling.cost import StepCost

__all__ = [
    "Budget",
    "allocate",
    "check_survival",
    "early_stop_budget",
    "global_budget",
    "schedulable",
    "uniform_budget",
]

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Budget:
    """Chosen number of draft tokens for the whole step."""

    draft_tokens: int
    batch_tokens: int
    tau: float
    """Tokens that the step is expected to commit."""
    theta: float
    """Expected tokens a second."""
    stopped_after: int | None = None
    """Early stop: the 1-based candidate that did not pay; None when all were admitted (and for the global search)."""


def check_survival(survival: FloatArray) -> FloatArray:
    """Survivals must be [R, G] probabilities that never rise along a request."""
    a = np.asarray(survival, dtype=np.float64)
    if a.ndim != 2:
        raise DataError(f"survival has shape {a.shape}: it must be [requests, slots]")
    if not ((a >= 0.0) & (a <= 1.0)).all():
        row, slot = np.argwhere(~((a >= 0.0) & (a <= 1.0)))[0]
        raise DataError(f"survival of request {row}, slot {slot} is {a[row, slot]}: it must be a probability")
    if a.shape[1] > 1 and (a[:, 1:] > a[:, :-1]).any():
        row = int(np.argwhere(a[:, 1:] > a[:, :-1])[0][0])
        raise DataError(f"survival of request {row} rises along its slots: pass running products, not confidences")
    return a


def schedulable(survival: FloatArray, *, floor: float = 0.0, capacity: IntArray | None = None) -> FloatArray:
    """Survivals with zeros where a token must not be verified: below ``floor``, or at slots >= ``capacity`` [R]."""
    a = survival
    if floor > 0.0:
        a = np.where(a >= floor, a, 0.0)
    if capacity is not None:
        a = np.where(np.arange(a.shape[1])[None, :] < np.asarray(capacity)[:, None], a, 0.0)
    return a


def _curves(
    survival: FloatArray, cost: StepCost, max_batch_tokens: int | None, context: float | None
) -> tuple[FloatArray, FloatArray]:
    """Curves of ``tau`` and ``Theta`` after 0, 1, ... admissions."""
    requests = survival.shape[0]
    ranked = np.sort(survival, axis=None)[::-1]
    count = int(np.searchsorted(-ranked, 0.0, side="left"))
    if max_batch_tokens is not None:
        count = min(count, max(max_batch_tokens - requests, 0))
    tau = np.empty(count + 1)
    tau[0] = requests
    tau[1:] = ranked[:count]
    np.cumsum(tau, out=tau)
    return tau, tau * cost.steps_per_second(requests, requests + np.arange(count + 1), context)


def early_stop_budget(
    survival: FloatArray, cost: StepCost, *, max_batch_tokens: int | None = None, context: float | None = None
) -> Budget:
    """Algorithm 1 on survivals [R, G] (see :func:`schedulable` for what is left out)."""
    if not len(survival):
        return Budget(0, 0, 0.0, 0.0)
    tau, theta = _curves(survival, cost, max_batch_tokens, context)
    stops = np.flatnonzero(theta[1:] <= theta[:-1])
    best = int(stops[0]) if len(stops) else len(theta) - 1
    stopped = best + 1 if len(stops) else None
    return Budget(best, len(survival) + best, float(tau[best]), float(theta[best]), stopped)


def global_budget(
    survival: FloatArray, cost: StepCost, *, max_batch_tokens: int | None = None, context: float | None = None
) -> Budget:
    """Section 5.2 on survivals [R, G]: the first maximum of Theta over all budgets."""
    if not len(survival):
        return Budget(0, 0, 0.0, 0.0)
    tau, theta = _curves(survival, cost, max_batch_tokens, context)
    best = int(np.argmax(theta))
    return Budget(best, len(survival) + best, float(tau[best]), float(theta[best]))


def allocate(survival: FloatArray, draft_tokens: int) -> IntArray:
    """Lengths [R] that verify the ``draft_tokens`` best candidates (fewer if there are fewer)."""
    requests = len(survival)
    positive = survival > 0.0
    total = int(np.count_nonzero(positive))
    if draft_tokens >= total:
        return positive.sum(axis=1, dtype=np.int64)
    if draft_tokens <= 0:
        return np.zeros(requests, dtype=np.int64)
    rank = survival.size - draft_tokens
    threshold = np.partition(survival, rank, axis=None)[rank]
    lengths = (survival > threshold).sum(axis=1, dtype=np.int64)
    tied = np.flatnonzero((survival == threshold).T)[: draft_tokens - int(lengths.sum())]
    return lengths + np.bincount(tied % requests, minlength=requests)


def uniform_budget(
    survival: FloatArray,
    cost: StepCost,
    *,
    max_batch_tokens: int | None = None,
    context: float | None = None,
) -> tuple[int, Budget]:
    """One length for all requests, for engines that pad a step to its longest request: B = R (1 + length).

    Returns the length and its budget. Like the global search it must see confidences of earlier steps only.
    """
    requests, gamma = survival.shape
    if not requests:
        return 0, Budget(0, 0, 0.0, 0.0)
    tau = requests + np.concatenate(([0.0], np.cumsum(survival.sum(axis=0))))
    tokens = requests * (1 + np.arange(gamma + 1))
    if max_batch_tokens is not None:
        tokens = tokens[tokens <= max(max_batch_tokens, requests)]
    theta = tau[: len(tokens)] * cost.steps_per_second(requests, tokens, context)
    best = int(np.argmax(theta))
    return best, Budget(requests * best, int(tokens[best]), float(tau[best]), float(theta[best]))
