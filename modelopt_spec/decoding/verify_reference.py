"""The rules of :mod:`modelopt_spec.decoding.verify` for one row, word by word."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["verify_row_greedy", "verify_row_sampled"]


def verify_row_greedy(logits: Tensor, draft_tokens: list[int]) -> list[int]:
    """Tokens that a round commits: logits [n+1, V], n draft tokens."""
    committed = []
    for slot, token in enumerate(draft_tokens):
        best = int(logits[slot].argmax())
        committed.append(best)
        if best != token:
            return committed
    return [*committed, int(logits[len(draft_tokens)].argmax())]


def verify_row_sampled(
    p: Tensor, q: Tensor, draft_tokens: list[int], uniforms: list[float], draw: Callable[[Tensor], int]
) -> list[int]:
    """Tokens that a round commits: p [n+1, V], q [n, V]; one uniform number a slot; ``draw`` samples weights [V]."""
    committed: list[int] = []
    for slot, token in enumerate(draft_tokens):
        if not uniforms[slot] < min(1.0, float(p[slot, token] / q[slot, token])):
            residual = torch.clamp(p[slot] - q[slot], min=0)
            return [*committed, draw(residual if float(residual.sum()) > 0 else p[slot])]
        committed.append(token)
    return [*committed, draw(p[len(draft_tokens)])]
