"""The confidence head: one logit a slot, trained towards the probability that the slot's token is accepted.

c_k = sigmoid(w . [h_k; e_k] + b)            (DSpark paper, section 3.2)

e_k, the head's embedding of x_{k-1}, is optional.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ConfidenceHead"]


class ConfidenceHead(nn.Module):
    """Linear probe of the backbone's hidden state and, optionally, of the previous token's embedding."""

    def __init__(self, hidden_size: int, embedding_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + embedding_dim, 1, bias=bias)

    def forward(self, hidden: Tensor, prev_embedding: Tensor | None) -> Tensor:
        """Hidden [..., D], prev_embedding [..., E] or None -> logits [...]."""
        inputs = hidden if prev_embedding is None else torch.cat([hidden, prev_embedding.to(hidden.dtype)], dim=-1)
        return self.proj(inputs).squeeze(-1)
