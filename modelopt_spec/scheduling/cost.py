"""What one verification step costs: tables over batch tokens and requests.

Words: R requests in the batch, M batch tokens ``M = R + draft tokens sent to the target``, T step time in seconds,
SPS steps per second = 1 / T.

* :class:`CostTable`, one axis: SPS over M, looked up as a staircase (value at the largest knot <= M) or linearly
  interpolated; clamped outside of the knots.
* :class:`AdditiveCostTable`, two axes: ``T(R, M) = bias + alpha(R) + theta(M)``, linear between probes, clamped. Only
  theta falls when fewer draft tokens are verified. A cliff is two neighbouring probes.
* :class:`CostProfile`: such tables at several context lengths, T interpolated between them.

``to_dict`` / :func:`cost_from_dict` (the ``cost`` section of ``scheduler.json``)::

    {"kind": "staircase" | "linear", "batch_tokens": [int], "steps_per_second": [float]}
    {"kind": "additive", "bias_seconds": float, "request_probes": [int], "alpha_seconds": [float],
     "token_probes": [int], "theta_seconds": [float], "draft_seconds": [float] | null,
     "plain_seconds": [float] | null}
    {"kind": "profile", "contexts": [int], "tables": [one of the above]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from modelopt_spec.errors import ConfigError, DataError

__all__ = ["AdditiveCostTable", "CostProfile", "CostTable", "StepCost", "check_informative", "cost_from_dict"]

FloatArray = NDArray[np.floating[Any]]


class StepCost(Protocol):
    """What the scheduler and the simulation ask a cost model."""

    @property
    def max_tokens(self) -> int:
        """Largest batch tokens that were measured; beyond it lookups are clamped."""
        ...

    def steps_per_second(self, requests: int, tokens: ArrayLike, context: float | None = None) -> FloatArray:
        """SPS for R requests at each of ``tokens`` [...] (batch tokens) -> [...]."""
        ...

    def step_seconds(self, requests: int, tokens: ArrayLike, context: float | None = None) -> FloatArray:
        """T of the same."""
        ...

    def plain_step_seconds(self, requests: int, context: float | None = None) -> float:
        """T of a step without drafting that decodes one token a request."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """JSON form, see the module's docstring."""
        ...


@dataclass(frozen=True)
class CostTable:
    """SPS over batch tokens; says nothing about the number of requests."""

    batch_tokens: tuple[int, ...]
    steps_per_sec: tuple[float, ...]
    lookup: Literal["staircase", "linear"] = "staircase"

    def __post_init__(self) -> None:
        _check_axis("batch_tokens", self.batch_tokens, "steps_per_second", self.steps_per_sec, positive=True)
        if self.lookup not in ("staircase", "linear"):
            raise ConfigError(f"lookup is {self.lookup!r}: it is 'staircase' or 'linear'")

    @classmethod
    def dense(cls, steps_per_second: Sequence[float]) -> CostTable:
        """Table with a value for each token count; index 0 is unused."""
        return cls(tuple(range(1, len(steps_per_second))), tuple(float(v) for v in steps_per_second[1:]))

    @property
    def max_tokens(self) -> int:
        """Largest knot."""
        return self.batch_tokens[-1]

    def steps_per_second(self, requests: int, tokens: ArrayLike, context: float | None = None) -> FloatArray:
        """See :class:`StepCost`; ``requests`` and ``context`` make no difference here."""
        wanted = np.asarray(tokens, dtype=np.float64)
        values = np.asarray(self.steps_per_sec)
        if self.lookup == "linear":
            return np.interp(wanted, self.batch_tokens, values)
        index = np.searchsorted(self.batch_tokens, wanted, side="right") - 1
        return values[np.clip(index, 0, len(values) - 1)]

    def step_seconds(self, requests: int, tokens: ArrayLike, context: float | None = None) -> FloatArray:
        """See :class:`StepCost`."""
        return 1.0 / self.steps_per_second(requests, tokens, context)

    def plain_step_seconds(self, requests: int, context: float | None = None) -> float:
        """T at one token a request: the table does not know which part of it is drafting."""
        return float(self.step_seconds(requests, requests))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "kind": self.lookup,
            "batch_tokens": list(self.batch_tokens),
            "steps_per_second": list(self.steps_per_sec),
        }


@dataclass(frozen=True)
class AdditiveCostTable:
    """``T(R, M) = bias + alpha(R) + theta(M)`` in seconds."""

    bias_seconds: float
    request_probes: tuple[int, ...]
    alpha_seconds: tuple[float, ...]
    token_probes: tuple[int, ...]
    theta_seconds: tuple[float, ...]
    draft_seconds: tuple[float, ...] | None = None
    """The part of bias + alpha that is drafting, at each request probe: a step without speculation does not pay it."""
    plain_seconds: tuple[float, ...] | None = None
    """Measured steps without speculation at each request probe; else ``T(R, R)`` less the drafting stands for them."""

    def __post_init__(self) -> None:
        _check_axis("request_probes", self.request_probes, "alpha_seconds", self.alpha_seconds)
        _check_axis("token_probes", self.token_probes, "theta_seconds", self.theta_seconds)
        if not np.isfinite(self.bias_seconds) or self.bias_seconds < 0:
            raise ConfigError(f"bias_seconds is {self.bias_seconds}: a step time is finite and not negative")
        if self.bias_seconds + min(self.alpha_seconds) + min(self.theta_seconds) <= 0:
            raise ConfigError("bias_seconds, alpha_seconds and theta_seconds add up to 0 somewhere: a step takes time")
        if self.draft_seconds is not None:
            _check_axis("request_probes", self.request_probes, "draft_seconds", self.draft_seconds)
        if self.plain_seconds is not None:
            _check_axis("request_probes", self.request_probes, "plain_seconds", self.plain_seconds, positive=True)

    @property
    def max_tokens(self) -> int:
        """Largest token probe."""
        return self.token_probes[-1]

    def normalised(self) -> AdditiveCostTable:
        """The same T with alpha and theta starting at 0 and the whole constant in bias."""
        low_alpha, low_theta = min(self.alpha_seconds), min(self.theta_seconds)
        return replace(
            self,
            bias_seconds=self.bias_seconds + low_alpha + low_theta,
            alpha_seconds=tuple(v - low_alpha for v in self.alpha_seconds),
            theta_seconds=tuple(v - low_theta for v in self.theta_seconds),
        )

    def step_seconds(self, requests: int, tokens: ArrayLike, context: float | None = None) -> FloatArray:
        """See :class:`StepCost`."""
        alpha = float(np.interp(requests, self.request_probes, self.alpha_seconds))
        theta = np.interp(np.asarray(tokens, dtype=np.float64), self.token_probes, self.theta_seconds)
        return self.bias_seconds + alpha + theta

    def steps_per_second(self, requests: int, tokens: ArrayLike, context: float | None = None) -> FloatArray:
        """See :class:`StepCost`."""
        return 1.0 / self.step_seconds(requests, tokens, context)

    def plain_step_seconds(self, requests: int, context: float | None = None) -> float:
        """As measured, or T(R, R) less the drafting part."""
        if self.plain_seconds is not None:
            return float(np.interp(requests, self.request_probes, self.plain_seconds))
        whole = float(self.step_seconds(requests, requests))
        if self.draft_seconds is None:
            return whole
        return max(whole - float(np.interp(requests, self.request_probes, self.draft_seconds)), 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"kind": "additive"} | {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class CostProfile:
    """Tables at several context lengths; T is interpolated linearly between them and clamped outside."""

    contexts: tuple[int, ...]
    tables: tuple[CostTable | AdditiveCostTable, ...]

    def __post_init__(self) -> None:
        if not self.contexts or len(self.contexts) != len(self.tables):
            raise ConfigError(f"contexts {self.contexts} and {len(self.tables)} tables: give one table a context")
        if list(self.contexts) != sorted(set(self.contexts)):
            raise ConfigError(f"contexts {self.contexts} must be strictly increasing")

    @property
    def max_tokens(self) -> int:
        """Batch tokens that all contexts were measured up to."""
        return min(table.max_tokens for table in self.tables)

    def at(self, context: float | None) -> CostTable | AdditiveCostTable:
        """The table of the nearest measured context; of the shortest without a context."""
        if context is None:
            return self.tables[0]
        return self.tables[int(np.argmin(np.abs(np.asarray(self.contexts, dtype=np.float64) - context)))]

    def _mix(self, context: float | None) -> list[tuple[float, CostTable | AdditiveCostTable]]:
        position = 0.0 if context is None else float(np.interp(context, self.contexts, np.arange(len(self.contexts))))
        low = min(int(position), len(self.tables) - 1)
        share = position - low
        return [(1.0 - share, self.tables[low])] + ([(share, self.tables[low + 1])] if share > 0 else [])

    def step_seconds(self, requests: int, tokens: ArrayLike, context: float | None = None) -> FloatArray:
        """See :class:`StepCost`; without a context the shortest one's."""
        first, *rest = self._mix(context)
        seconds = first[0] * first[1].step_seconds(requests, tokens)
        for share, table in rest:
            seconds = seconds + share * table.step_seconds(requests, tokens)
        return seconds

    def steps_per_second(self, requests: int, tokens: ArrayLike, context: float | None = None) -> FloatArray:
        """See :class:`StepCost`."""
        return 1.0 / self.step_seconds(requests, tokens, context)

    def plain_step_seconds(self, requests: int, context: float | None = None) -> float:
        """See :class:`StepCost`."""
        return sum(share * table.plain_step_seconds(requests) for share, table in self._mix(context))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "kind": "profile",
            "contexts": list(self.contexts),
            "tables": [table.to_dict() for table in self.tables],
        }


def cost_from_dict(data: Mapping[str, Any]) -> CostTable | AdditiveCostTable | CostProfile:
    """Inverse of ``to_dict``; ConfigError names what is wrong."""
    kind = data.get("kind")
    try:
        if kind in ("staircase", "linear"):
            return CostTable(_ints(data["batch_tokens"]), _floats(data["steps_per_second"]), kind)
        if kind == "additive":
            draft = data.get("draft_seconds")
            return AdditiveCostTable(
                float(data["bias_seconds"]),
                _ints(data["request_probes"]),
                _floats(data["alpha_seconds"]),
                _ints(data["token_probes"]),
                _floats(data["theta_seconds"]),
                None if draft is None else _floats(draft),
                None if data.get("plain_seconds") is None else _floats(data["plain_seconds"]),
            )
        if kind == "profile":
            tables = [cost_from_dict(table) for table in data["tables"]]
            plain = tuple(table for table in tables if not isinstance(table, CostProfile))
            return CostProfile(_ints(data["contexts"]), plain)
    except KeyError as error:
        raise ConfigError(f"cost table of kind {kind!r} lacks the key {error}") from error
    raise ConfigError(f"cost table kind is {kind!r}: known are 'staircase', 'linear', 'additive', 'profile'")


def check_informative(
    cost: StepCost, *, gamma: int, requests: Sequence[int], context: float | None = None, tolerance: float = 0.01
) -> None:
    """Refuse a table from which a scheduler can learn nothing.

    *Flat*: at every request count the time of verifying whole blocks exceeds that of verifying none by less than
    ``tolerance``. *Inert*: even draft tokens of survival 0.05 would all be verified at every request count, so the
    decision is the same as without a table. Both make a scheduler verify everything, silently.

    Args:
        cost: the table.
        gamma: draft tokens of a full block.
        requests: batch sizes that the table was measured for.
        context: context length to look at.
        tolerance: least relative rise of the step time that counts.
    """
    worth_trimming = False
    spread = 0.0
    for count in requests:
        drafts = np.arange(count * gamma + 1)
        seconds = cost.step_seconds(count, count + drafts, context)
        spread = max(spread, float(seconds[-1] / seconds[0] - 1.0))
        rate = (count + 0.05 * drafts) / seconds
        worth_trimming |= int(np.argmax(rate)) < len(drafts) - 1
    if spread < tolerance:
        raise DataError(
            f"the cost table is flat: verifying whole blocks costs at most {100 * spread:.2f}% more than "
            f"verifying none at {list(requests)} requests. Measure larger batches, or repeat on an idle machine"
        )
    if not worth_trimming:
        raise DataError(
            f"the cost table is inert: at {list(requests)} requests even draft tokens that survive 5% of the time "
            "would all be verified, so a scheduler with it does nothing. Measure larger batches (more requests)"
        )


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(v) for v in values)


def _check_axis(
    knots_name: str, knots: Sequence[int], values_name: str, values: Sequence[float], *, positive: bool = False
) -> None:
    if not knots:
        raise ConfigError(f"{knots_name} is empty: a cost table needs at least one measured point")
    if len(knots) != len(values):
        raise ConfigError(f"{knots_name} has {len(knots)} entries, {values_name} {len(values)}: they belong together")
    if list(knots) != sorted(set(knots)) or knots[0] < 0:
        raise ConfigError(f"{knots_name} {list(knots)} must be strictly increasing and not negative")
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all() or (array < 0).any() or (positive and (array == 0).any()):
        bad = [v for v in values if not np.isfinite(v) or v < 0 or (positive and v == 0)]
        raise ConfigError(f"{values_name} holds {bad}: entries must be finite and {'positive' if positive else '>= 0'}")
