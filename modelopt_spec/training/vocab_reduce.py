"""Reductions over the vocabulary: nothing to do on one rank, a collective where ranks hold a part of it each.

The loss needs the vocabulary as a whole only through maxima, sums and the logit of one label; everything else is
local to a row of W. Legend: m rows, V' vocabulary rows of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["GroupReduce", "VocabReduce"]


class VocabReduce:
    """One rank holds the whole vocabulary."""

    sharded: bool = False
    start: int = 0
    """First token of this rank."""

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks of the vocabulary."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks of the vocabulary."""
        return values

    def at_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Entry of each row [m, V'] at its label [m], wherever that is held: [m]."""
        index, inside = self._local(labels, logits.shape[-1])
        if logits.shape[-1] == 0:
            return self.sum(logits.new_zeros(len(labels)))
        values = logits.gather(1, index.unsqueeze(1)).squeeze(1)
        return values if inside is None else self.sum(values.masked_fill(~inside, 0))

    def add_at_labels(self, values: Tensor, labels: Tensor, addend: float) -> None:
        """Add a number to each row [m, V'] at its label [m], on the rank that holds it, in place."""
        if values.shape[-1] == 0:
            return
        index, inside = self._local(labels, values.shape[-1])
        addends = torch.full_like(index, addend, dtype=values.dtype)
        if inside is not None:
            addends.masked_fill_(~inside, 0)
        values.scatter_add_(1, index.unsqueeze(1), addends.unsqueeze(1))

    def logsumexp(self, local: Tensor) -> Tensor:
        """Combine each rank's log-sum-exp [m]."""
        if not self.sharded:
            return local
        top = self.max(local)
        return top + self.sum((local - top).exp()).log()

    def argmax(self, value: Tensor, index: Tensor) -> Tensor:
        """Combine each rank's maximum [m] and its local index [m] to the first token that attains the maximum."""
        if not self.sharded:
            return index
        token = torch.where(value == self.max(value), index + self.start, torch.iinfo(index.dtype).max)
        return -self.max(-token)

    def _local(self, labels: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        """Local index of each label, clamped to this rank, and whether it is held here (None: all are)."""
        if not self.sharded:
            return labels, None
        local = labels - self.start
        return local.clamp(0, max(width - 1, 0)), (local >= 0) & (local < width)


class GroupReduce(VocabReduce):
    """Ranks of a process group hold consecutive rows of the vocabulary each, this one from token ``start`` on.

    All ranks call the loss with the same rows; each gets the whole loss, whole gradients of hidden states and latents,
    and its own rows of W_out's gradient. A rank may hold no token at all.
    """

    sharded = True

    def __init__(self, group: Any, start: int) -> None:
        self.group = group
        self.start = start

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the group."""
        return self._all_reduce(values, torch.distributed.ReduceOp.MAX)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the group."""
        return self._all_reduce(values, torch.distributed.ReduceOp.SUM)

    def _all_reduce(self, values: Tensor, op: Any) -> Tensor:
        result = values.clone()
        torch.distributed.all_reduce(result, op=op, group=self.group)
        return result
