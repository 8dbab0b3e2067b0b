"""Even load on a drafter's experts while it trains: the auxiliary loss, the bias update, and what a log shows of it.

Legend: E experts, L layers with experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.drafter.moe_training import RoutedTraining
from modelopt_spec.records import BlockBatch

__all__ = ["ExpertBalance", "with_balance_loss"]

NAMED_EXPERTS = 32
"""Layers of up to so many experts show each one's tokens in a log."""


def with_balance_loss(loss: Tensor, drafter: Drafter, blocks: BlockBatch, divisor: Tensor | float | None) -> Tensor:
    """A batch's share of the loss with its share of the auxiliary loss of the last training pass.

    The auxiliary loss of a step is the mean over its micro-batches and ranks, each counting by its slot weights.
    """
    if not (drafter.training and isinstance(drafter, RoutedTraining)):
        return loss
    auxiliary = drafter.auxiliary_loss()
    if auxiliary is None:
        return loss
    share = 1.0 if divisor is None else blocks.weights.sum() / divisor
    return loss + share * auxiliary.to(loss.dtype)


class ExpertBalance(TrainerCallback):
    """Counts what the routers chose, over micro-batches and ranks, and moves their biases after each step."""

    def __init__(self, drafter: RoutedTraining, reduce: Callable[[Tensor], Any]) -> None:
        """Args: reduce: sums a tensor over all ranks."""
        self.drafter, self.reduce = drafter, reduce
        self._step: Tensor | None = None
        self._log: Tensor | None = None

    @staticmethod
    def of(drafter: Drafter, reduce: Callable[[Tensor], Any]) -> ExpertBalance | None:
        """The callback of a drafter with experts; None without."""
        routed = isinstance(drafter, RoutedTraining) and drafter.experts_of_layers()
        return ExpertBalance(drafter, reduce) if routed and isinstance(drafter, RoutedTraining) else None

    def observe(self) -> None:
        """Add what the routers did in the last training pass: [L, 2 E + 2] sums, see :class:`RoutingStats`."""
        rows = [torch.cat([part.detach().double().view(-1) for part in stats]) for stats in self.drafter.routing]
        if not rows:
            return
        new = torch.stack(rows)
        self._step = new if self._step is None else self._step + new
        self._log = new if self._log is None else self._log + new

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Even out the load by the whole step's choices."""
        if self._step is not None:
            totals = self.reduce(self._step)
            self.drafter.balance(list(totals[:, : (totals.shape[1] - 2) // 2]))
            self._step = None

    def metrics(self) -> dict[str, float]:
        """Load, entropy and dropped choices since the last call, over all ranks.

        ``load_max`` and ``load_min`` are relative to even load, ``entropy`` to that of an even router; ``balance`` is
        the auxiliary loss without its weight (1 is even), whether or not it is trained on.
        """
        if self._log is None:
            return {}
        found: dict[str, float] = {}
        blocks = self.drafter.experts_of_layers()
        totals, self._log = self.reduce(self._log).tolist(), None
        dropped = 0.0
        for layer, (row, block) in enumerate(zip(totals, blocks, strict=True)):
            half, entropy, tokens = (len(row) - 2) // 2, row[-2], row[-1]
            counts, probability, chosen = row[:half], row[half : 2 * half], block.config.experts_per_token or 1
            mean = sum(counts) / half
            if not mean:
                continue
            even = sum(count * share for count, share in zip(counts, probability, strict=True)) / tokens**2
            found[f"moe/{layer}/balance"] = half / chosen * even
            found[f"moe/{layer}/load_max"] = max(counts) / mean
            found[f"moe/{layer}/load_min"] = min(counts) / mean
            found[f"moe/{layer}/entropy"] = entropy / tokens / max(math.log(half), 1e-12)
            dropped += tokens * chosen - sum(counts)
            if len(counts) <= NAMED_EXPERTS:
                found |= {f"moe/{layer}/tokens/{expert}": count for expert, count in enumerate(counts)}
        return {**found, "moe/dropped": dropped} if found else {}
