"""Hyper-connections written as their equations, one token at a time: slow and obviously right.

Legend: n streams, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["collapse_reference", "connection_reference", "merge_reference", "sinkhorn_reference"]


def sinkhorn_reference(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """One [n, n] matrix, entry by entry."""
    n = logits.shape[0]
    rows = [[torch.exp(logits[i, j] - logits[i].max()) for j in range(n)] for i in range(n)]
    matrix = [[rows[i][j] / sum(rows[i]) + eps for j in range(n)] for i in range(n)]
    for step in range(iterations):
        if step > 0:
            for i in range(n):
                total = sum(matrix[i]) + eps
                matrix[i] = [entry / total for entry in matrix[i]]
        for j in range(n):
            total = sum(matrix[i][j] for i in range(n)) + eps
            for i in range(n):
                matrix[i][j] = matrix[i][j] / total
    return torch.stack([torch.stack([torch.as_tensor(entry) for entry in row]) for row in matrix])


def _projected(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    flat = streams.flatten()
    return fn @ (flat / torch.sqrt((flat * flat).mean() + norm_eps))


def connection_reference(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One token's streams [n, D] -> pre [n], post [n], comb [n, n]."""
    n = streams.shape[0]
    m = _projected(streams, fn, norm_eps)
    pre = torch.sigmoid(m[:n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[2 * n :] * scale[2] + base[2 * n :]).view(n, n)
    return pre, post, sinkhorn_reference(logits, iterations, eps)


def merge_reference(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams [n, D] of one token."""
    n = streams.shape[0]
    return torch.stack([post[j] * output + sum(comb[i, j] * streams[i] for i in range(n)) for j in range(n)])


def collapse_reference(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """One token's streams [n, D] -> [D]."""
    pre = torch.sigmoid(_projected(streams, fn, norm_eps) * scale + base) + eps
    return sum(pre[i] * streams[i] for i in range(streams.shape[0]))  # type: ignore[return-value]
