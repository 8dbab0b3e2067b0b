"""Throughput curves: policies simulated over a range of loads, and their comparison with measured throughput.

The report (JSON, ``mtsp simulate`` writes it, the figures read it)::

    {"kind": "mtsp.simulation", "version": 1, "gamma": G, "load": "concurrency" | "rate" | "batch", "acceptance": str,
     "engine": {"max_running", "padded", "prefill_tokens_per_second", "overhead_seconds", "measured_tokens",
                "extrapolated"},
     "policies": [{"name": str, "points": [{"load": float} | figures of one run (simulation.py)]}]}

Measured throughput to compare with: ``{"kind": "mtsp.measured_throughput", "points": [{"policy", "load",
"throughput"}]}``, ``throughput`` in tokens a second of the whole engine over the whole run: for ``generate``, tokens
committed by rounds over the time of the rounds (load ``batch``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from modelopt_spec.arguments import check_seed, number, whole_number
from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.cost import AdditiveCostTable, CostProfile, CostTable
from modelopt_spec.scheduling.cost_extend import extended
from modelopt_spec.scheduling.policies import FixedLength, LengthPolicy, NoSpeculation, PrefixScheduler, StaticThreshold
from modelopt_spec.scheduling.rounds import RoundTable
from modelopt_spec.scheduling.simulation import Engine, check_range, simulate, simulate_batches, summarise
from modelopt_spec.scheduling.workload import AcceptanceProcess, closed_loop, open_loop

__all__ = ["DEFAULT_POLICIES", "SIMULATION_KIND", "compare_measured", "policy_from_name", "simulate_loads"]

SIMULATION_KIND = "mtsp.simulation"
DEFAULT_POLICIES = ("none", "fixed", "threshold:0.5", "scheduler")

Cost = CostTable | AdditiveCostTable | CostProfile
Load = Literal["concurrency", "rate", "batch"]


def policy_from_name(
    name: str,
    *,
    gamma: int,
    cost: Cost | None = None,
    temperatures: Sequence[float] | None = None,
    prior: Sequence[float] | None = None,
    offset: float = 0.0,
    padded: bool = False,
    **settings: Any,
) -> LengthPolicy:
    """Policy of a short name: ``none``, ``fixed``, ``fixed:K``, ``threshold:P``, ``scheduler`` or ``early_stop``.

    Args:
        name: the short name.
        gamma: draft tokens of a full block.
        cost: step costs, for the schedulers.
        temperatures: calibration, for thresholds and schedulers.
        prior: confidences that stand in for unknown ones.
        offset: of the calibration.
        padded: the engine pads a step to its longest request.
        settings: further arguments of ``PrefixScheduler``.
    """
    kind, _, value = name.partition(":")
    try:
        share = float(value) if value else None
    except ValueError as error:
        raise ConfigError(f"policy {name!r}: {value!r} is no number") from error
    if kind == "none":
        return NoSpeculation(gamma)
    if kind == "fixed":
        return FixedLength(
            gamma, None if share is None else whole_number(f"length of policy {name!r}", share, 0, gamma)
        )
    if kind == "threshold":
        if share is None:
            raise ConfigError("policy 'threshold' needs its probability, for example threshold:0.5")
        return StaticThreshold(gamma, share, None if temperatures is None else tuple(temperatures), offset=offset)
    if kind in ("scheduler", "early_stop"):
        if cost is None:
            raise ConfigError(f"policy {name!r} needs a cost table: profile the machine first")
        method: Literal["global_stale", "early_stop"] = "global_stale" if kind == "scheduler" else "early_stop"
        return PrefixScheduler(
            cost,
            gamma,
            temperatures=temperatures,
            offset=offset,
            method=method,
            prior=prior,
            padded=padded,
            **settings,
        )
    raise ConfigError(f"policy {name!r} is unknown: use none, fixed, fixed:K, threshold:P, scheduler or early_stop")


def simulate_loads(
    rounds: RoundTable,
    cost: Cost,
    *,
    loads: Sequence[float],
    load: Load = "concurrency",
    policies: Sequence[str] = DEFAULT_POLICIES,
    temperatures: Sequence[float] | None = None,
    prior: Sequence[float] | None = None,
    offset: float = 0.0,
    max_running: int = 256,
    padded: bool = False,
    prefill_tokens_per_second: float | None = None,
    overhead_seconds: float = 0.0,
    output_tokens: int | None = None,
    max_output_tokens: int | None = None,
    requests: int | None = None,
    acceptance: Literal["sequential", "bootstrap"] = "sequential",
    extrapolate: bool = False,
    seed: int = 0,
    scheduler_settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Simulate each policy at each load.

    Args:
        rounds: recorded full-block rounds, the acceptance process.
        cost: step times of the engine; the schedulers use the same table.
        loads: concurrent requests, arrivals a second (``load="rate"``), or rows of a batch (``load="batch"``: all
            recorded prompts once, in batches that are drained one after the other, as ``generate`` does it).
        load: what ``loads`` means.
        policies: short names, see :func:`policy_from_name`.
        temperatures: calibration.
        prior: confidences that stand in for unknown ones.
        offset: of the calibration.
        max_running: requests that run at once when loads are rates.
        padded: the engine pads a step to its longest request.
        prefill_tokens_per_second: see :class:`modelopt_spec.scheduling.simulation.Engine`.
        overhead_seconds: see the same.
        output_tokens: tokens of each output; default the recorded lengths.
        max_output_tokens: cut recorded lengths to this.
        requests: requests in all; default four times the concurrency and at least 64.
        acceptance: see :mod:`modelopt_spec.scheduling.workload`.
        extrapolate: continue the cost table beyond its measured range instead of refusing.
        seed: of prompts and arrivals.
        scheduler_settings: further arguments of ``PrefixScheduler``.

    Returns:
        The report of the module's docstring.
    """
    if load not in get_args(Load):
        raise ConfigError(f"load is {load!r}: it is one of {', '.join(get_args(Load))}")
    if not loads:
        raise ConfigError("loads is empty: name at least one")
    for value in loads:
        if load == "rate":
            number("loads", value, 0, above=True, wanted="a positive number of requests a second")
        else:
            whole_number("loads", value, 1, note=f" (load {load!r} counts requests)")
    whole_number("max_running", max_running, 1)
    if requests is not None:
        whole_number("requests", requests, 1)
    if output_tokens is not None:
        whole_number("output_tokens", output_tokens, 1)
    check_seed("seed", seed)
    process = AcceptanceProcess.from_rounds(rounds, acceptance, seed)
    if max_output_tokens is not None:
        if max_output_tokens < 1:
            raise ConfigError(f"max_output_tokens is {max_output_tokens}: an output has at least one token")
        process = replace(process, output_tokens=np.minimum(process.output_tokens, max_output_tokens))
    limit = max_running if load == "rate" else max(int(v) for v in loads)
    most = limit * (process.gamma + 1)
    measured_tokens = cost.max_tokens
    if extrapolate and most > measured_tokens:
        cost = extended(cost, tokens=most, requests=limit)
    engine = Engine(cost, limit, padded, prefill_tokens_per_second, overhead_seconds)
    curves = []
    for name in policies:
        points = []
        for value in loads:
            policy = policy_from_name(
                name,
                gamma=process.gamma,
                cost=cost,
                temperatures=temperatures,
                prior=prior,
                offset=offset,
                padded=padded,
                **(scheduler_settings or {}),
            )
            running = max_running if load == "rate" else int(value)
            here = replace(engine, max_running=running)
            count = max(4 * running, 64) if requests is None else int(requests)
            if load == "batch":
                log, work = simulate_batches(process, here, policy, output_tokens)
            elif load == "concurrency":
                work = closed_loop(process, requests=count, output_tokens=output_tokens, seed=seed)
                log = simulate(process, work, here, policy)
            else:
                work = open_loop(process, requests=count, rate=value, output_tokens=output_tokens, seed=seed)
                log = simulate(process, work, here, policy)
            result = summarise(log, work, here)
            check_range(result, here)
            points.append({"load": float(value)} | result.to_dict())
        curves.append({"name": name, "points": points})
    return {
        "kind": SIMULATION_KIND,
        "version": 1,
        "gamma": process.gamma,
        "load": load,
        "acceptance": acceptance,
        "engine": {
            "max_running": limit,
            "padded": padded,
            "prefill_tokens_per_second": prefill_tokens_per_second,
            "overhead_seconds": overhead_seconds,
            "measured_tokens": measured_tokens,
            "extrapolated": cost.max_tokens > measured_tokens,
        },
        "policies": curves,
    }


def compare_measured(simulation: Mapping[str, Any], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Simulated against measured throughput of whole runs: one row a measured point, with its relative error."""
    known = {
        (curve["name"], float(point["load"])): point for curve in simulation["policies"] for point in curve["points"]
    }
    points, needed = measured.get("points"), ("policy", "load", "throughput")
    if not isinstance(points, list) or not all(isinstance(p, Mapping) and all(n in p for n in needed) for p in points):
        raise DataError(
            f"the measured throughput has no list `points` of {', '.join(needed)}: name a file of kind "
            "mtsp.measured_throughput"
        )
    rows = []
    for point in points:
        key = (point["policy"], float(point["load"]))
        if key not in known:
            raise DataError(f"measured point {key} was not simulated: simulate the same policies and loads")
        simulated = known[key]["throughput_all"]
        rows.append(
            {
                "policy": key[0],
                "load": key[1],
                "measured": point["throughput"],
                "simulated": simulated,
                "relative_error": simulated / point["throughput"] - 1.0,
            }
        )
    return rows
