"""Measure the time of verification steps over requests, batch tokens and context lengths.

The harness knows nothing of models: it times a function that runs one step. Each repeat visits every cell once, in an
order of its own, so that a machine that slows down for a while slows all cells alike; the median over the repeats is
kept. JSON form of the result (written by ``profile_cost``)::

    {"kind": "mtsp.cost_measurements", "version": 1, "gamma": G, "repeats": n, "warmup": n,
     "cells": [{"requests", "tokens", "context", "seconds", "draft_seconds"}], "spread": [relative deviation a cell]}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelopt_spec.errors import ConfigError
from modelopt_spec.scheduling.cost_fit import Cell, check_connected

__all__ = [
    "MEASUREMENTS_KIND",
    "CostMeasurements",
    "deal_tokens",
    "default_request_counts",
    "default_token_grid",
    "measure_cost",
    "pool_measurements",
]

MEASUREMENTS_KIND = "mtsp.cost_measurements"

StepFunction = Callable[[int, int, int], object]
DraftFunction = Callable[[int, int], object]


@dataclass(frozen=True)
class CostMeasurements:
    """Medians of the timed steps and how much the repeats scattered."""

    gamma: int
    repeats: int
    warmup: int
    cells: tuple[Cell, ...]
    spread: tuple[float, ...]
    """Median absolute deviation over the repeats of each cell, relative to its median."""

    def to_dict(self) -> dict[str, Any]:
        """JSON form, see the module's docstring."""
        return {
            "kind": MEASUREMENTS_KIND,
            "version": 1,
            "gamma": self.gamma,
            "repeats": self.repeats,
            "warmup": self.warmup,
            "cells": [cell.to_dict() for cell in self.cells],
            "spread": list(self.spread),
        }


def deal_tokens(requests: int, tokens: int, gamma: int) -> NDArray[np.int64]:
    """Draft tokens a request, as even as possible: [R] in 0..gamma with ``R + sum = tokens``. For step functions."""
    drafts = tokens - requests
    if not 0 <= drafts <= requests * gamma:
        raise ConfigError(
            f"{tokens} batch tokens for {requests} requests: with {gamma} draft tokens there are {requests} to "
            f"{requests * (gamma + 1)}"
        )
    base, extra = divmod(drafts, requests)
    return base + (np.arange(requests) < extra).astype(np.int64)


def default_request_counts(most: int) -> list[int]:
    """Batch sizes 1, 2, 4, ... up to ``most``, which is included: neighbours share token counts for any gamma."""
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


def default_token_grid(requests: Sequence[int], gamma: int) -> list[int]:
    """Batch tokens of every request count at every uniform verification length: shared by neighbouring counts."""
    return sorted({count * (length + 1) for count in requests for length in range(gamma + 1)})


def measure_cost(
    step_fn: StepFunction,
    *,
    requests: Sequence[int],
    gamma: int,
    contexts: Sequence[int] = (512,),
    tokens: Sequence[int] | None = None,
    draft_fn: DraftFunction | None = None,
    repeats: int = 7,
    warmup: int = 2,
    refine_cliffs: int = 0,
    uniform: bool = False,
    two_axes: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> CostMeasurements:
    """Time verification steps.

    Args:
        step_fn: ``step_fn(requests, tokens, context)`` runs one verification step to its end (synchronise inside) with
            ``tokens`` batch tokens in all (see :func:`deal_tokens`) over ``context`` cached tokens a request.
        requests: batch sizes.
        gamma: draft tokens of a full block.
        contexts: cached tokens a request.
        tokens: batch tokens to try at each batch size where they fit; default :func:`default_token_grid`.
        draft_fn: ``draft_fn(requests, context)`` runs one draft pass; its time is added to the step's.
        repeats: timed visits of each cell.
        warmup: untimed visits of each cell.
        refine_cliffs: extra token counts a context length, placed one by one into the steepest gap between neighbours
            (so that a staircase's cliffs are pinned down).
        uniform: only token counts that give every request the same number, for engines that pad.
        two_axes: refuse, before any time is spent, cells that a two-axis table cannot be fitted to.
        clock: seconds; process time suits a shared machine.
        seed: of the visiting order.
    """
    if repeats < 3:
        raise ConfigError(f"repeats is {repeats}: a median needs at least 3")
    if uniform and refine_cliffs:
        raise ConfigError("refine_cliffs needs uneven steps: leave it at 0 with uniform")
    counts = sorted(set(requests))
    if not counts or counts[0] < 1:
        raise ConfigError(f"requests {list(requests)}: name at least one batch size, each at least 1")
    grid = sorted(set(tokens)) if tokens is not None else default_token_grid(counts, gamma)
    wanted = [
        (count, m, context)
        for context in contexts
        for count in counts
        for m in grid
        if count <= m <= count * (gamma + 1) and not (uniform and m % count)
    ]
    if not wanted:
        raise ConfigError(f"tokens {grid}: none is between R and R * {gamma + 1} for the requests {counts}")
    if two_axes:
        check_connected([(count, m) for count, m, _ in wanted])
    timer = _Timer(step_fn, draft_fn, repeats, warmup, clock, np.random.default_rng(seed))
    measured = timer.run(wanted)
    for context in contexts:
        for _ in range(refine_cliffs):
            between = _steepest_gap([cell for cell, _ in measured if cell.context == context], gamma)
            if between is None:
                break
            measured += timer.run([(count, between[1], context) for count in between[0]])
    measured.sort(key=lambda item: (item[0].context, item[0].requests, item[0].tokens))
    return CostMeasurements(
        gamma, repeats, warmup, tuple(cell for cell, _ in measured), tuple(spread for _, spread in measured)
    )


def pool_measurements(slices: Sequence[CostMeasurements]) -> CostMeasurements:
    """One measurement out of several of the same cells, made at different times: medians of their medians.

    ``spread`` becomes the median absolute deviation between the slices, relative to the median.
    """
    if not slices:
        raise ConfigError("no measurement to pool: give at least one")
    shapes = [[(c.requests, c.tokens, c.context) for c in one.cells] for one in slices]
    if any(shape != shapes[0] for shape in shapes) or len({one.gamma for one in slices}) > 1:
        raise ConfigError("the measurements to pool have different cells: measure the same requests and contexts")
    cells, spread = [], []
    for same in zip(*(one.cells for one in slices)):
        times = np.array([cell.seconds for cell in same])
        median = float(np.median(times))
        draft = float(np.median([cell.draft_seconds for cell in same]))
        cells.append(Cell(same[0].requests, same[0].tokens, same[0].context, median, draft))
        spread.append(float(np.median(np.abs(times - median))) / median)
    repeats = sum(one.repeats for one in slices)
    return CostMeasurements(slices[0].gamma, repeats, slices[0].warmup, tuple(cells), tuple(spread))


@dataclass
class _Timer:
    step_fn: StepFunction
    draft_fn: DraftFunction | None
    repeats: int
    warmup: int
    clock: Callable[[], float]
    rng: np.random.Generator

    def run(self, wanted: Sequence[tuple[int, int, int]]) -> list[tuple[Cell, float]]:
        """Time each (requests, tokens, context); draft passes once for each (requests, context)."""
        steps: list[list[float]] = [[] for _ in wanted]
        shapes = sorted({(count, context) for count, _, context in wanted}) if self.draft_fn else []
        drafts: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
        for repeat in range(self.warmup + self.repeats):
            keep = repeat >= self.warmup
            for index in self.rng.permutation(len(wanted)).tolist():
                count, m, context = wanted[index]
                seconds = self._time(partial(self.step_fn, count, m, context))
                if keep:
                    steps[index].append(seconds)
            for count, context in shapes:
                assert self.draft_fn is not None
                seconds = self._time(partial(self.draft_fn, count, context))
                if keep:
                    drafts[count, context].append(seconds)
        result = []
        for (count, m, context), times in zip(wanted, steps):
            median = float(np.median(times))
            draft = float(np.median(drafts[count, context])) if self.draft_fn else 0.0
            spread = float(np.median(np.abs(np.asarray(times) - median)) / median) if median > 0 else 0.0
            result.append((Cell(count, m, context, median + draft, draft), spread))
        return result

    def _time(self, call: Callable[[], object]) -> float:
        start = self.clock()
        call()
        return self.clock() - start


def _steepest_gap(cells: Sequence[Cell], gamma: int) -> tuple[list[int], int] | None:
    """Request counts and a token count in the middle of the largest rise between neighbouring measured token counts."""
    best: tuple[float, list[int], int] | None = None
    for count in sorted({cell.requests for cell in cells}):
        mine = sorted((cell.tokens, cell.seconds) for cell in cells if cell.requests == count)
        for (low, t_low), (high, t_high) in pairwise(mine):
            if high - low > 1 and (best is None or t_high - t_low > best[0]):
                best = (t_high - t_low, [count], (low + high) // 2)
    if best is None:
        return None
    middle = best[2]
    fits = [c for c in sorted({cell.requests for cell in cells}) if c <= middle <= c * (gamma + 1)]
    known = {(cell.requests, cell.tokens) for cell in cells}
    return [c for c in fits if (c, middle) not in known], middle
