"""The serving simulation request by request, without arrays: the tests compare the vectorised one with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelopt_spec.scheduling.policies import LengthPolicy
from modelopt_spec.scheduling.simulation import Engine, StepLog
from modelopt_spec.scheduling.workload import AcceptanceProcess, Workload

__all__ = ["simulate_reference"]


@dataclass
class _Request:
    number: int
    arrival: float
    row: int
    left: int
    context: int
    rounds: int = 0
    start: float = float("nan")
    finish: float = float("nan")


def simulate_reference(process: AcceptanceProcess, workload: Workload, engine: Engine, policy: LengthPolicy) -> StepLog:
    """Same contract as :func:`modelopt_spec.scheduling.simulation.simulate`."""
    requests = [
        _Request(q, float(arrival), int(row), int(output), int(context))
        for q, (arrival, row, output, context) in enumerate(
            zip(workload.arrival, workload.first_row, workload.output_tokens, workload.context_tokens)
        )
    ]
    queue = list(requests)
    running: list[_Request] = []
    steps: list[dict[str, float]] = []
    now = 0.0
    while queue or running:
        prompt_tokens = 0
        while queue and queue[0].arrival <= now and len(running) < engine.max_running:
            request = queue.pop(0)
            request.start = now
            prompt_tokens += request.context
            running.append(request)
        if not running:
            now = queue[0].arrival
            continue
        waiting = sum(request.arrival <= now for request in queue)
        context = float(np.mean([request.context for request in running]))
        width = max(request.context for request in running) if engine.padded else context
        lengths = [0] * len(running)
        if policy.speculates:
            logits = None
            if process.confidence_logits is not None:
                logits = np.stack([process.confidence_logits[request.row] for request in running])
            capacity = [min(request.left - 1, process.gamma) for request in running]
            names = [request.number for request in running]
            lengths = list(policy.lengths(logits, request_ids=names, capacity=capacity, context=context))
            sent = len(running) * (1 + max(lengths)) if engine.padded else len(running) + sum(lengths)
            seconds = float(engine.cost.step_seconds(len(running), sent, width))
        else:
            sent = len(running)
            seconds = engine.cost.plain_step_seconds(len(running), width)
        if engine.prefill_tokens_per_second is not None:
            seconds += prompt_tokens / engine.prefill_tokens_per_second
        seconds += engine.overhead_seconds
        now += seconds
        step = {"end": now, "seconds": seconds, "running": len(running), "waiting": waiting, "batch_tokens": sent}
        step |= {"verified": sum(lengths), "committed": 0}
        for request, length in zip(running, lengths):
            tokens = 1
            while tokens - 1 < length and tokens - 1 < process.accepted[request.row] and tokens < request.left:
                tokens += 1
            step["committed"] += tokens
            request.left -= tokens
            request.context += tokens
            request.rounds += 1
            one = [np.array([value]) for value in (request.row, request.number, request.rounds)]
            request.row = int(process.advance(*one)[0])
            if request.left == 0:
                request.finish = now
                policy.finish([request.number])
        running = [request for request in running if request.left > 0]
        steps.append(step)

    def column(name: str) -> np.ndarray:
        return np.array([step[name] for step in steps])

    return StepLog(
        end=column("end"),
        seconds=column("seconds"),
        running=column("running"),
        verified=column("verified"),
        committed=column("committed"),
        waiting=column("waiting"),
        batch_tokens=column("batch_tokens"),
        start=np.array([request.start for request in requests]),
        finish=np.array([request.finish for request in requests]),
    )
