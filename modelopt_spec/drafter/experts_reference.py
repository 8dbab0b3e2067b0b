"""Routed experts token by token and expert by expert: what :mod:`modelopt_spec.drafter.experts` must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["experts_reference"]


def experts_reference(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float | None = None
) -> Tensor:
    """[M, D] tokens, [M, k] experts and weights, [E, 2I, D] and [E, D, I] matrices -> [M, D]."""
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[token])
        for place in range(ids.shape[1]):
            expert = int(ids[token, place])
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            total = total + weights[token, place] * (down[expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)
