"""Policies that decide a step's verification lengths, all behind one call.

Legend: R requests of the step, G slots of a block (gamma).

``lengths(confidence_logits, request_ids=..., capacity=...)`` returns how many draft tokens of each request are sent to
the target. The decision never depends on the token that it is about, which is what keeps speculative sampling lossless:
a fixed length and a threshold look at earlier slots only, :class:`PrefixScheduler` as its docstring says.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.calibration import check_temperatures, sigmoid
from modelopt_spec.scheduling.cost import StepCost
from modelopt_spec.scheduling.prefix_scheduler import (
    Budget,
    allocate,
    early_stop_budget,
    global_budget,
    schedulable,
    uniform_budget,
)

__all__ = ["FixedLength", "LengthPolicy", "NoSpeculation", "PrefixScheduler", "StaticThreshold"]

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]
Logits = NDArray[Any] | torch.Tensor | None


class LengthPolicy(Protocol):
    """What generation, evaluation and the simulation call once a step."""

    @property
    def gamma(self) -> int:
        """Draft tokens of a full block."""
        ...

    @property
    def speculates(self) -> bool:
        """False: nothing is drafted at all."""
        ...

    def lengths(
        self,
        confidence_logits: Logits,
        *,
        request_ids: Sequence[Hashable] | None = None,
        capacity: Any = None,
        context: float | None = None,
    ) -> Any:
        """Draft tokens to verify.

        Args:
            confidence_logits: [R, G] raw logits of this step's blocks; None without a confidence head (``capacity``
                then says how many requests there are). A row of +inf is a request without confidence.
            request_ids: [R] names that follow a request from step to step; default its row.
            capacity: [R] draft tokens that may be verified at most (tokens left, room in the cache); default G.
            context: mean context length of the step, for cost tables that have that axis.

        Returns:
            int64 [R] in 0..min(G, capacity): a tensor for a tensor of logits, else a numpy array.
        """
        ...

    def finish(self, request_ids: Iterable[Hashable]) -> None:
        """Forget requests that are done."""
        ...


def _inputs(logits: Logits, capacity: Any, gamma: int) -> tuple[FloatArray | None, IntArray]:
    """Validated float64 logits [R, G] (or None) and int64 capacities [R] in 0..G."""
    z: FloatArray | None = None
    if logits is not None:
        array = logits.detach().cpu().double().numpy() if isinstance(logits, torch.Tensor) else np.asarray(logits)
        z = array.astype(np.float64, copy=False)
        if z.ndim != 2 or z.shape[1] != gamma:
            raise DataError(
                f"confidence_logits has shape {z.shape}, this scheduler is for [requests, {gamma}]: the drafter drafts "
                "another number of tokens than the scheduler was calibrated for"
            )
        if np.isnan(z).any():
            row, slot = np.argwhere(np.isnan(z))[0]
            raise DataError(
                f"confidence_logits of request {row}, slot {slot} is NaN: the drafter's confidence head is broken"
            )
    if capacity is None:
        if z is None:
            raise DataError("confidence_logits and capacity are both None: the number of requests is unknown")
        return z, np.full(len(z), gamma, dtype=np.int64)
    limit = capacity.detach().cpu().numpy() if isinstance(capacity, torch.Tensor) else np.asarray(capacity)
    if limit.ndim != 1 or (z is not None and len(limit) != len(z)):
        raise DataError(f"capacity has shape {limit.shape} for confidence logits of {None if z is None else z.shape}")
    return z, np.clip(limit.astype(np.int64), 0, gamma)


def _output(lengths: IntArray, logits: Logits) -> Any:
    return torch.from_numpy(lengths) if isinstance(logits, torch.Tensor) else lengths


class _Stateless:
    """Policies that remember nothing."""

    speculates = True

    def finish(self, request_ids: Iterable[Hashable]) -> None:
        """Nothing to forget."""


@dataclass(frozen=True)
class NoSpeculation(_Stateless):
    """Plain decoding: verify nothing; the simulation charges no draft pass."""

    gamma: int = 0
    speculates = False

    def lengths(
        self,
        confidence_logits: Logits,
        *,
        request_ids: Sequence[Hashable] | None = None,
        capacity: Any = None,
        context: float | None = None,
    ) -> Any:
        """Zeros [R]; see :class:`LengthPolicy`."""
        rows = len(capacity) if confidence_logits is None else len(confidence_logits)
        return _output(np.zeros(rows, dtype=np.int64), confidence_logits)


@dataclass(frozen=True)
class FixedLength(_Stateless):
    """The same number of draft tokens for every request."""

    gamma: int
    length: int | None = None
    """Tokens to verify; None for whole blocks."""

    def __post_init__(self) -> None:
        if self.length is not None and not 0 <= self.length <= self.gamma:
            raise ConfigError(f"length is {self.length}: a block of this drafter has 0 to {self.gamma} draft tokens")

    def lengths(
        self,
        confidence_logits: Logits,
        *,
        request_ids: Sequence[Hashable] | None = None,
        capacity: Any = None,
        context: float | None = None,
    ) -> Any:
        """See :class:`LengthPolicy`."""
        _, limit = _inputs(confidence_logits, capacity, self.gamma)
        wanted = self.gamma if self.length is None else self.length
        return _output(np.minimum(limit, wanted), confidence_logits)


@dataclass(frozen=True)
class StaticThreshold(_Stateless):
    """Verify the leading slots whose survival (or own confidence) reaches a threshold, whatever the load."""

    gamma: int
    threshold: float
    temperatures: tuple[float, ...] | None = None
    on: Literal["survival", "confidence"] = "survival"
    offset: float = 0.0
    """Added to the logits before the temperatures divide them."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ConfigError(f"threshold is {self.threshold}: it is a probability")
        if self.on not in ("survival", "confidence"):
            raise ConfigError(f"on is {self.on!r}: it is 'survival' or 'confidence'")
        if self.temperatures is not None:
            check_temperatures(self.temperatures, self.gamma)

    def lengths(
        self,
        confidence_logits: Logits,
        *,
        request_ids: Sequence[Hashable] | None = None,
        capacity: Any = None,
        context: float | None = None,
    ) -> Any:
        """See :class:`LengthPolicy`; a request without confidence is verified in full."""
        z, limit = _inputs(confidence_logits, capacity, self.gamma)
        if z is None:
            return _output(limit, confidence_logits)
        z = z + self.offset
        c = sigmoid(z if self.temperatures is None else z / np.asarray(self.temperatures))
        passed = (np.cumprod(c, axis=1) if self.on == "survival" else c) >= self.threshold
        return _output(np.minimum(np.cumprod(passed, axis=1).sum(axis=1), limit), confidence_logits)


class PrefixScheduler:
    """The hardware-aware prefix scheduler with its memory of earlier confidences.

    * ``method="global_stale"`` (default, paper section 5.2; what the engines do): the step's budget is the global best
      for the survivals that each request had ``delay`` steps ago; the step's own survivals decide who gets it
      (``allocation="current"``). Lossless: the budget knows nothing of this step's tokens, and a token's rank only
      depends on tokens before it. ``allocation="stale"`` also shares it out by the old survivals.
    * ``method="early_stop"`` (Algorithm 1): everything from the step's own survivals, stopping at the first drop.
    * ``padded=True``: one length for all requests, for engines that pad (global_stale only).

    A request without confidence (its row is +inf, no logits at all, or not yet ``delay`` steps old where stale ones are
    needed) counts with ``prior``: survival 1 in every slot by default, so it is verified in full where the budget
    allows and never starves; give the calibrated mean confidences to be less generous.
    """

    speculates = True

    def __init__(
        self,
        cost: StepCost,
        gamma: int,
        *,
        temperatures: Sequence[float] | None = None,
        offset: float = 0.0,
        method: Literal["global_stale", "early_stop"] = "global_stale",
        allocation: Literal["current", "stale"] = "current",
        delay: int = 2,
        survival_floor: float = 0.0,
        max_batch_tokens: int | None = None,
        prior: Sequence[float] | None = None,
        padded: bool = False,
    ) -> None:
        if gamma < 1:
            raise ConfigError(f"gamma is {gamma}: a block has at least one draft token")
        if not np.isfinite(offset):
            raise ConfigError(f"offset is {offset}: it must be finite")
        if method not in ("global_stale", "early_stop"):
            raise ConfigError(f"method is {method!r}: it is 'global_stale' or 'early_stop'")
        if allocation not in ("current", "stale"):
            raise ConfigError(f"allocation is {allocation!r}: it is 'current' or 'stale'")
        if method == "global_stale" and delay < 1:
            raise ConfigError(
                f"delay is {delay}: a global search on confidences of the same step changes the output distribution. "
                "Use delay 1 or more, or method 'early_stop'"
            )
        if padded and method != "global_stale":
            raise ConfigError("padded needs method 'global_stale': else the length would depend on this step's tokens")
        if not 0.0 <= survival_floor < 1.0:
            raise ConfigError(f"survival_floor is {survival_floor}: it is a probability below 1 (0 for none)")
        if max_batch_tokens is not None and max_batch_tokens < 1:
            raise ConfigError(f"max_batch_tokens is {max_batch_tokens}: it must be positive, or null for no limit")
        self.cost = cost
        self.gamma = gamma
        self.temperatures = None if temperatures is None else check_temperatures(temperatures, gamma)
        self.offset = offset
        self.method = method
        self.allocation = allocation
        self.delay = delay
        self.survival_floor = survival_floor
        self.max_batch_tokens = max_batch_tokens
        self.padded = padded
        self.prior = np.ones(gamma) if prior is None else np.asarray(prior, dtype=np.float64)
        if self.prior.shape != (gamma,) or not ((self.prior >= 0) & (self.prior <= 1)).all():
            raise ConfigError(f"prior {self.prior.tolist()} must hold {gamma} confidences between 0 and 1")
        self.last_budget: Budget | None = None
        """The decision of the latest step, for logs."""
        self._history = _History(gamma, delay)

    def lengths(
        self,
        confidence_logits: Logits,
        *,
        request_ids: Sequence[Hashable] | None = None,
        capacity: Any = None,
        context: float | None = None,
    ) -> Any:
        """See :class:`LengthPolicy`. Call once a step with all requests of the step."""
        z, limit = _inputs(confidence_logits, capacity, self.gamma)
        rows = len(limit)
        confidence = np.broadcast_to(self.prior, (rows, self.gamma)) if z is None else self._confidence(z)
        current = self._survival(confidence, limit)
        if self.method == "early_stop":
            self.last_budget = early_stop_budget(
                current, self.cost, max_batch_tokens=self.max_batch_tokens, context=context
            )
            return _output(allocate(current, self.last_budget.draft_tokens), confidence_logits)
        ids = range(rows) if request_ids is None else request_ids
        if len(ids) != rows:
            raise DataError(f"{len(ids)} request_ids for {rows} requests")
        stale = self._survival(self._history.exchange(ids, confidence, self.prior), limit)
        if self.padded:
            length, self.last_budget = uniform_budget(
                stale, self.cost, max_batch_tokens=self.max_batch_tokens, context=context
            )
            return _output(np.minimum(limit, length), confidence_logits)
        self.last_budget = global_budget(stale, self.cost, max_batch_tokens=self.max_batch_tokens, context=context)
        ranked = current if self.allocation == "current" else stale
        return _output(allocate(ranked, self.last_budget.draft_tokens), confidence_logits)

    def finish(self, request_ids: Iterable[Hashable]) -> None:
        """Forget requests that are done; a later request of the same name starts without history."""
        self._history.forget(request_ids)

    def reset(self) -> None:
        """Forget every request."""
        self._history = _History(self.gamma, self.delay)

    def _confidence(self, z: FloatArray) -> FloatArray:
        shifted = z + self.offset
        c = sigmoid(shifted if self.temperatures is None else shifted / self.temperatures)
        unknown = (z == np.inf).all(axis=1)
        return np.where(unknown[:, None], self.prior, c) if unknown.any() else c

    def _survival(self, confidence: FloatArray, capacity: IntArray) -> FloatArray:
        return schedulable(np.cumprod(confidence, axis=1), floor=self.survival_floor, capacity=capacity)


class _History:
    """Confidences of each request's latest ``delay`` steps in a ring: arrays over rows, a dict from request to row."""

    def __init__(self, gamma: int, delay: int) -> None:
        self._delay = delay
        self._row: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._ring = np.empty((0, max(delay, 1), gamma))
        self._seen = np.zeros(0, dtype=np.int64)

    def exchange(self, ids: Sequence[Hashable], confidence: FloatArray, prior: FloatArray) -> FloatArray:
        """Store this step's confidences [R, G] and return those of ``delay`` steps ago, ``prior`` [G] where unknown."""
        rows = self._rows(ids)
        slot = self._seen[rows] % self._delay
        old = np.where((self._seen[rows] >= self._delay)[:, None], self._ring[rows, slot], prior)
        self._ring[rows, slot] = confidence
        self._seen[rows] += 1
        return old

    def forget(self, ids: Iterable[Hashable]) -> None:
        for name in ids:
            row = self._row.pop(name, None)
            if row is not None:
                self._free.append(row)

    def _rows(self, ids: Sequence[Hashable]) -> IntArray:
        try:
            rows = [self._row[name] for name in ids]
        except KeyError:
            rows = [self._add(name) for name in ids]
        if len(set(rows)) < len(rows):
            raise DataError("request_ids holds a name twice: each request of a step needs a name of its own")
        return np.asarray(rows, dtype=np.int64)

    def _add(self, name: Hashable) -> int:
        known = self._row.get(name)
        if known is not None:
            return known
        if not self._free:
            size = len(self._seen)
            more = max(64, size)
            self._ring = np.concatenate([self._ring, np.zeros((more, *self._ring.shape[1:]))])
            self._seen = np.concatenate([self._seen, np.zeros(more, dtype=np.int64)])
            self._free = list(range(size + more - 1, size - 1, -1))
        row = self._free.pop()
        self._seen[row] = 0
        self._row[name] = row
        return row
