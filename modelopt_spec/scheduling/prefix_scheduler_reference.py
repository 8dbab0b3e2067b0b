"""The prefix scheduler one candidate at a time, as the paper writes it (Algorithm 1 and section 5.2).

Slow and plain: the tests compare the vectorised :mod:`modelopt_spec.scheduling.prefix_scheduler` with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["ReferenceAllocation", "TraceStep", "candidates", "early_stop_reference", "global_argmax_reference"]


@dataclass(frozen=True)
class TraceStep:
    """One admission: how many so far, the last one's request (-1 at the start) and 1-based position, B, tau, Theta."""

    admitted: int
    request: int
    position: int
    batch_tokens: int
    tau: float
    theta: float


@dataclass(frozen=True)
class ReferenceAllocation:
    """Verification lengths, their Theta, the evaluated steps and, for early stop, the candidate that ended it."""

    lengths: tuple[int, ...]
    theta: float
    batch_tokens: int
    tau: float
    stopped_after: int | None
    trace: tuple[TraceStep, ...]


def candidates(survival: Sequence[Sequence[float]], floor: float = 0.0) -> list[tuple[int, int, float]]:
    """Draft tokens (request, 1-based position, survival) that may be verified, best first.

    Survival must be positive and at least ``floor``. Ties go to the earlier position, then to the earlier request:
    never to anything that depends on token values.
    """
    found = [(r, j + 1, a) for r, row in enumerate(survival) for j, a in enumerate(row) if a > 0.0 and a >= floor]
    return sorted(found, key=lambda item: (-item[2], item[1], item[0]))


def _walk(
    survival: Sequence[Sequence[float]], sps: Callable[[int], float], floor: float, max_batch_tokens: int | None
) -> list[TraceStep]:
    """All admissions in order, without stopping."""
    requests = len(survival)
    tau = float(requests)
    steps = [TraceStep(0, -1, 0, requests, tau, tau * sps(requests))]
    for r, j, a in candidates(survival, floor):
        tokens = requests + len(steps)
        if max_batch_tokens is not None and tokens > max_batch_tokens:
            break
        tau += a
        steps.append(TraceStep(len(steps), r, j, tokens, tau, tau * sps(tokens)))
    return steps


def _result(
    requests: int, steps: Sequence[TraceStep], best: int, seen: Sequence[TraceStep], stopped: int | None
) -> ReferenceAllocation:
    lengths = [0] * requests
    for step in steps[1 : best + 1]:
        lengths[step.request] = step.position
    chosen = steps[best]
    return ReferenceAllocation(tuple(lengths), chosen.theta, chosen.batch_tokens, chosen.tau, stopped, tuple(seen))


def early_stop_reference(
    survival: Sequence[Sequence[float]],
    sps: Callable[[int], float],
    *,
    floor: float = 0.0,
    max_batch_tokens: int | None = None,
) -> ReferenceAllocation:
    """Algorithm 1: admit one candidate at a time and stop at the first that does not raise ``Theta = tau * SPS(B)``."""
    steps = _walk(survival, sps, floor, max_batch_tokens)
    best = 0
    for index in range(1, len(steps)):
        if steps[index].theta <= steps[best].theta:
            return _result(len(survival), steps, best, steps[: index + 1], index)
        best = index
    return _result(len(survival), steps, best, steps, None)


def global_argmax_reference(
    survival: Sequence[Sequence[float]],
    sps: Callable[[int], float],
    *,
    floor: float = 0.0,
    max_batch_tokens: int | None = None,
) -> ReferenceAllocation:
    """Section 5.2: the best point of the whole walk; the first one if several are equal."""
    steps = _walk(survival, sps, floor, max_batch_tokens)
    best = 0
    for index in range(1, len(steps)):
        if steps[index].theta > steps[best].theta:
            best = index
    return _result(len(survival), steps, best, steps, None)
