"""What a training log shows: loss terms, accepted length and acceptance per slot, as sums over batches and ranks.

Legend: M supervised slots, K slots of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_spec.records import BlockBatch
from modelopt_spec.training.loss import LossResult, LossWeights, SlotRows

__all__ = ["TERMS", "LogSums", "StepStatistics", "statistics", "summary"]

TERMS = ("ce", "base_ce", "tv", "confidence", "kl")
"""Loss terms in the order in which their sums travel."""


@dataclass(frozen=True)
class StepStatistics:
    """Sums over the supervised slots of a batch; the trainer adds them up over batches and ranks."""

    terms: Tensor
    """[2 * terms] sum and weight sum of each loss term, in the order of ``names``."""
    names: tuple[str, ...]
    slots: Tensor
    """[4, K]: supervised, reached with all earlier slots correct, correct among those, acceptance by probability."""
    blocks: Tensor
    """[3]: blocks, tokens committed by greedy agreement, and by acceptance probability (bonus included)."""

    @property
    def weight_sum(self) -> Tensor:
        """Sum of the row weights (D-PACE's included), float64 scalar."""
        return self.terms[1] if len(self.terms) else self.terms.new_zeros(())


@torch.no_grad()
def statistics(rows: SlotRows, result: LossResult, blocks: BlockBatch) -> StepStatistics:
    """What a training log shows, as sums.

    Slots are counted on from the first supervised one of each block. Greedy agreement compares the argmax of the
    corrected logits with the data's token; on text that the target wrote greedily it is the real acceptance. Where no
    term of the loss compares distributions, the sums by probability are NaN.
    """
    n_blocks, size = blocks.keep.numel(), blocks.input_ids.shape[-1]
    device = rows.labels.device

    def grid(values: Tensor) -> Tensor:
        full = torch.zeros(n_blocks, size, device=device)
        full[rows.blocks, rows.slots] = values.float()
        return full

    supervised = grid(torch.ones_like(rows.weights))
    correct = grid(result.correct)
    passed = torch.where(supervised.bool(), correct, 1.0).cumprod(1) * supervised
    before = torch.where(supervised.bool(), correct, 1.0).cumprod(1).roll(1, 1)
    before[:, 0] = 1.0
    reached = before * supervised
    has_any = supervised.any(1)
    accept = grid(result.acceptance) if result.acceptance is not None else torch.full_like(correct, torch.nan)
    by_probability = torch.where(supervised.bool(), accept, 1.0).cumprod(1) * supervised
    slots = torch.stack([supervised.sum(0), reached.sum(0), passed.sum(0), (accept * supervised).sum(0)])
    totals = torch.stack([has_any.sum().float(), passed.sum() + has_any.sum(), by_probability.sum() + has_any.sum()])
    names = tuple(result.terms)
    sums = [value for name in names for value in result.terms[name]]
    terms = (
        torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in sums]) if sums else torch.zeros(0)
    )
    return StepStatistics(terms=terms, names=names, slots=slots.double(), blocks=totals.double())


class LogSums:
    """Adds up :class:`StepStatistics` between two logs; terms may come and go (Domino's curriculum)."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._terms: dict[str, Tensor] = {}
        self._rest: Tensor | None = None

    def __bool__(self) -> bool:
        return self._rest is not None

    def add(self, new: StepStatistics) -> None:
        """Count one batch."""
        for name, pair in zip(new.names, new.terms.view(-1, 2), strict=True):
            self._terms[name] = self._terms[name] + pair if name in self._terms else pair
        rest = torch.cat([new.slots.flatten(), new.blocks])
        self._rest = rest if self._rest is None else self._rest + rest

    def tensor(self, device: torch.device) -> Tensor:
        """Everything in one vector [2 * len(TERMS) + 4 K + 3] float64, to be summed over ranks."""
        assert self._rest is not None
        nothing = torch.zeros(2, dtype=torch.float64, device=self._rest.device)
        return torch.cat([*(self._terms.get(name, nothing) for name in TERMS), self._rest]).to(device)


def summary(total: Tensor, weights: LossWeights, prefix: str = "") -> dict[str, float]:
    """Log entries of a vector of :meth:`LogSums.tensor`, summed over all ranks.

    Returns:
        Each term's mean, ``loss`` (their weighted sum), ``tau`` and ``tau_probability`` (tokens of a round, bonus
        included, by greedy agreement and by acceptance probability), ``acceptance/k`` given that the slots before were
        right, and ``acceptance_probability/k``. What nothing was counted for is left out.
    """
    values = total.tolist()
    pairs = {name: values[2 * i : 2 * i + 2] for i, name in enumerate(TERMS)}
    means = {name: amount / weight for name, (amount, weight) in pairs.items() if weight}
    found = dict(means)
    found["loss"] = sum(getattr(weights, name) * mean for name, mean in means.items())
    rest = values[2 * len(TERMS) :]
    size = (len(rest) - 3) // 4
    supervised, reached, passed, accept = (rest[i * size : (i + 1) * size] for i in range(4))
    blocks, greedy, by_probability = rest[-3:]
    found["tau"], found["tau_probability"] = greedy / max(blocks, 1.0), by_probability / max(blocks, 1.0)
    found |= {f"acceptance/{k}": passed[k] / reached[k] for k in range(size) if reached[k]}
    found |= {f"acceptance_probability/{k}": accept[k] / supervised[k] for k in range(size) if supervised[k]}
    return {prefix + name: value for name, value in found.items() if math.isfinite(value)}
