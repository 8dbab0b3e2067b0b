"""Carry a measured cost table on to larger batches, for simulations beyond what a machine can measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelopt_spec.errors import ConfigError
from modelopt_spec.scheduling.cost import AdditiveCostTable, CostProfile, CostTable
from modelopt_spec.scheduling.engine_tables import additive

__all__ = ["extended"]


def extended(
    cost: CostTable | AdditiveCostTable | CostProfile, *, tokens: int, requests: int | None = None
) -> AdditiveCostTable | CostProfile:
    """The same table with one more probe at ``tokens`` batch tokens (and at ``requests``), on a straight line.

    The line has the mean slope of the upper half of the measured range, so a cliff at the very end does not set it. One
    axis becomes two. A table of a single probe has no slope and is refused.
    """
    if isinstance(cost, CostProfile):
        tables = [extended(table, tokens=tokens, requests=requests) for table in cost.tables]
        return CostProfile(cost.contexts, tuple(t for t in tables if not isinstance(t, CostProfile)))
    table = additive(cost)
    if tokens > table.max_tokens:
        if len(table.token_probes) < 2:
            raise ConfigError(
                "token_probes has a single entry: there is no slope to extrapolate. Measure larger batches"
            )
        theta = _next(table.token_probes, table.theta_seconds, tokens)
        table = replace(
            table,
            token_probes=(*table.token_probes, tokens),
            theta_seconds=(*table.theta_seconds, theta),
        )
    if requests is not None and requests > table.request_probes[-1] > 1:
        draft, plain = table.draft_seconds, table.plain_seconds
        table = replace(
            table,
            request_probes=(*table.request_probes, requests),
            alpha_seconds=(*table.alpha_seconds, _next(table.request_probes, table.alpha_seconds, requests)),
            draft_seconds=None if draft is None else (*draft, _next(table.request_probes, draft, requests)),
            plain_seconds=None if plain is None else (*plain, _next(table.request_probes, plain, requests)),
        )
    return table


def _next(probes: Sequence[int], values: Sequence[float], at: int) -> float:
    """Value at ``at`` on the line through the last probe and the one nearest to half of it; never below the last."""
    if len(probes) < 2:
        return values[-1]
    middle = min(range(len(probes) - 1), key=lambda i: abs(probes[i] - probes[-1] / 2))
    slope = (values[-1] - values[middle]) / (probes[-1] - probes[middle])
    return values[-1] + max(slope, 0.0) * (at - probes[-1])
