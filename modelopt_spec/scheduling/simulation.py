"""Discrete-event simulation of a serving engine with continuous batching and speculative decoding.

Legend: R running requests, Q requests in all, G slots of a block (gamma), M batch tokens, T step time.

One event is an engine step. At its start, waiting requests are admitted up to ``max_running``; the policy chooses a
verification length l_r for each running request from the confidences of its current recorded round; the step lasts

    T = cost(R, M) + prefill + overhead,   M = R + sum_r l_r   (padded engines: M = R (1 + max_r l_r))

and commits ``min(accepted_r, l_r) + 1`` tokens a request, cut to what it still has to generate. A policy that does not
speculate costs ``cost.plain_step_seconds(R)`` instead. The clock only moves with steps, or to the next arrival when
nothing runs. :mod:`modelopt_spec.scheduling.simulation_reference` does the same request by request.

Not modelled: memory limits and preemption, chunked or mixed prefill, network and tokenisation, variation of step times,
and that a shorter verified prefix moves the anchors of later blocks (their recorded acceptance is used as it is).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.cost import StepCost
from modelopt_spec.scheduling.policies import LengthPolicy
from modelopt_spec.scheduling.workload import AcceptanceProcess, Workload, one_batch

__all__ = ["Engine", "SimulationResult", "StepLog", "check_simulation", "simulate", "simulate_batches", "summarise"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Engine:
    """The simulated machine."""

    cost: StepCost
    max_running: int
    """Requests that run at once."""
    padded: bool = False
    """The engine pads every request of a step to the longest one: in draft tokens, and in context."""
    prefill_tokens_per_second: float | None = None
    """Prompt tokens a second while nothing decodes; None: prefill happens elsewhere."""
    overhead_seconds: float = 0.0
    """Added to every step (scheduling on the host)."""

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise ConfigError(f"max_running is {self.max_running}: an engine runs at least one request")
        if self.prefill_tokens_per_second is not None and not self.prefill_tokens_per_second > 0:
            raise ConfigError(f"prefill_tokens_per_second is {self.prefill_tokens_per_second}: it must be positive")


@dataclass(frozen=True)
class StepLog:
    """What happened, as arrays: S steps and Q requests."""

    end: FloatArray
    """[S] time at the end of each step."""
    seconds: FloatArray
    """[S] its duration."""
    running: IntArray
    """[S] requests in it."""
    verified: IntArray
    """[S] draft tokens sent to the target."""
    committed: IntArray
    """[S] tokens committed."""
    waiting: IntArray
    """[S] requests that had arrived but did not run."""
    batch_tokens: IntArray
    """[S] M."""
    start: FloatArray
    """[Q] time of admission."""
    finish: FloatArray
    """[Q] time at which the last token was committed."""


@dataclass(frozen=True)
class SimulationResult:
    """One point of a throughput curve."""

    throughput: float
    """Tokens a second of the whole engine, in the steady part where there is one."""
    user_rate: float
    """Tokens a second from admission to last token, mean over the requests that finish in the steady part."""
    user_rate_p10: float
    user_rate_p50: float
    throughput_all: float
    """Tokens a second from the first admission to the last token, ramp-up and drain included."""
    accepted_length: float
    """Tokens committed a request and step (tau)."""
    verified_tokens: float
    """Draft tokens verified a request and step."""
    running: float
    """Mean requests in a step, weighted by time."""
    batch_tokens: float
    step_seconds: float
    wait_seconds: float
    """Mean time between arrival and admission."""
    steps: int
    tokens: int
    seconds: float
    beyond_table: float
    """Share of steps with more batch tokens than the cost table was measured for."""

    def to_dict(self) -> dict[str, float]:
        """JSON form."""
        return asdict(self)


def check_simulation(process: AcceptanceProcess, policy: LengthPolicy) -> None:
    """The policy must be for blocks of this process."""
    if policy.speculates and policy.gamma != process.gamma:
        raise ConfigError(
            f"the policy is for gamma {policy.gamma}, the recorded rounds have gamma {process.gamma}: use rounds and "
            "scheduler of one drafter"
        )


def simulate(process: AcceptanceProcess, workload: Workload, engine: Engine, policy: LengthPolicy) -> StepLog:
    """Run all requests to their end; deterministic."""
    check_simulation(process, policy)
    total = len(workload)
    row = workload.first_row.copy()
    done = np.zeros(total, dtype=np.int64)
    rounds = np.zeros(total, dtype=np.int64)
    start = np.full(total, np.nan)
    finish = np.full(total, np.nan)
    running = np.zeros(0, dtype=np.int64)
    log: list[tuple[float, float, int, int, int, int, int]] = []
    admitted, now = 0, 0.0
    while len(running) or admitted < total:
        arrived = int(np.searchsorted(workload.arrival, now, side="right"))
        new = max(min(arrived - admitted, engine.max_running - len(running)), 0)
        prefill = 0.0
        if new:
            start[admitted : admitted + new] = now
            if engine.prefill_tokens_per_second is not None:
                prompt = int(workload.context_tokens[admitted : admitted + new].sum())
                prefill = prompt / engine.prefill_tokens_per_second
            running = np.concatenate([running, np.arange(admitted, admitted + new)])
            admitted += new
        if not len(running):
            now = float(workload.arrival[admitted])
            continue
        count = len(running)
        rows = row[running]
        left = workload.output_tokens[running] - done[running]
        contexts = workload.context_tokens[running] + done[running]
        context = float(contexts.mean())
        width = float(contexts.max()) if engine.padded else context
        if policy.speculates:
            logits = None if process.confidence_logits is None else process.confidence_logits[rows]
            capacity = np.minimum(left - 1, process.gamma)
            lengths = policy.lengths(logits, request_ids=running.tolist(), capacity=capacity, context=context)
            tokens = count * (1 + int(lengths.max())) if engine.padded else count + int(lengths.sum())
            seconds = float(engine.cost.step_seconds(count, tokens, width))
        else:
            lengths, tokens = np.zeros(count, dtype=np.int64), count
            seconds = engine.cost.plain_step_seconds(count, width)
        seconds += prefill + engine.overhead_seconds
        committed = np.minimum(np.minimum(process.accepted[rows], lengths) + 1, left)
        now += seconds
        done[running] += committed
        rounds[running] += 1
        row[running] = process.advance(rows, running, rounds[running])
        over = committed == left
        if over.any():
            finish[running[over]] = now
            policy.finish(running[over].tolist())
            running = running[~over]
        waiting = arrived - admitted
        log.append((now, seconds, count, int(lengths.sum()), int(committed.sum()), waiting, tokens))
    end, seconds_, *counts = zip(*log)
    running_, verified, committed_, waiting_, batch_tokens = (np.array(c, dtype=np.int64) for c in counts)
    return StepLog(
        end=np.array(end, dtype=np.float64),
        seconds=np.array(seconds_, dtype=np.float64),
        running=running_,
        verified=verified,
        committed=committed_,
        waiting=waiting_,
        batch_tokens=batch_tokens,
        start=start,
        finish=finish,
    )


def simulate_batches(
    process: AcceptanceProcess, engine: Engine, policy: LengthPolicy, output_tokens: int | None = None
) -> tuple[StepLog, Workload]:
    """All recorded prompts in batches of ``max_running``, each drained before the next, as ``generate`` does it."""
    logs: list[StepLog] = []
    works: list[Workload] = []
    now = 0.0
    for begin in range(0, len(process.first_row), engine.max_running):
        prompts = np.arange(begin, min(begin + engine.max_running, len(process.first_row)))
        work = one_batch(process, prompts, output_tokens=output_tokens)
        log = simulate(process, work, engine, policy)
        logs.append(replace(log, end=log.end + now, start=log.start + now, finish=log.finish + now))
        works.append(replace(work, arrival=work.arrival + now))
        now = float(logs[-1].end[-1])
    joined = [
        {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(parts[0])}
        for parts in (logs, works)
    ]
    return StepLog(**joined[0]), Workload(**joined[1])


def summarise(log: StepLog, workload: Workload, engine: Engine) -> SimulationResult:
    """Figures of one run.

    The steady part begins when as many requests have finished as can run at once and ends when nothing waits any more;
    where that is empty (few requests, light load) the whole run counts.
    """
    finished = np.sort(log.finish)
    warm = finished[min(engine.max_running, len(finished)) - 1]
    steady = (log.end > warm) & (log.waiting > 0)
    if steady.sum() < 10:
        steady = np.ones(len(log.end), dtype=bool)
    seconds, committed = log.seconds[steady], log.committed[steady]
    time = float(seconds.sum())
    inside = (log.finish > warm) & (log.finish <= log.end[steady][-1])
    users = inside if inside.sum() >= 10 else np.ones(len(log.finish), dtype=bool)
    rates = (workload.output_tokens / (log.finish - log.start))[users]
    request_steps = float(log.running[steady].sum())
    duration = float(log.end[-1] - np.nanmin(log.start))
    return SimulationResult(
        throughput=float(committed.sum()) / time,
        user_rate=float(rates.mean()),
        user_rate_p10=float(np.quantile(rates, 0.1)),
        user_rate_p50=float(np.quantile(rates, 0.5)),
        throughput_all=float(log.committed.sum()) / duration,
        accepted_length=float(committed.sum()) / request_steps,
        verified_tokens=float(log.verified[steady].sum()) / request_steps,
        running=float((log.running[steady] * seconds).sum()) / time,
        batch_tokens=float(log.batch_tokens[steady].mean()),
        step_seconds=float(seconds.mean()),
        wait_seconds=float((log.start - workload.arrival).mean()),
        steps=len(log.end),
        tokens=int(log.committed.sum()),
        seconds=duration,
        beyond_table=float((log.batch_tokens > engine.cost.max_tokens).mean()),
    )


def check_range(result: SimulationResult, engine: Engine) -> None:
    """Refuse figures from beyond the measured cost: a clamped table makes the tokens there free."""
    if result.beyond_table > 0:
        raise DataError(
            f"{100 * result.beyond_table:.0f}% of the steps have more than {engine.cost.max_tokens} batch tokens, the "
            "largest that the cost table was measured for. Measure larger batches, or extrapolate"
        )
