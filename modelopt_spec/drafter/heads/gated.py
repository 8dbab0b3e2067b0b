"""DSpark's gated Markov head (DSpark paper, section 3.1; DeepSpec's `gate_proj`): the bigram bias, gated by context.

u_k = sigmoid(G [h_k; e_k]) * e_k,    e_k = W1[x_{k-1}]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.config import HeadConfig
from modelopt_spec.drafter.heads.base import HeadContext, register_head
from modelopt_spec.drafter.heads.vanilla import VanillaMarkovHead


@register_head("gated")
class GatedMarkovHead(VanillaMarkovHead):
    """u_k = sigmoid(G [h_k; W1[x_{k-1}]]) * W1[x_{k-1}]."""

    def __init__(self, config: HeadConfig, context: HeadContext) -> None:
        super().__init__(config, context)
        self.gate_proj = nn.Linear(context.hidden_size + config.rank, config.rank)

    def latents(self, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """[..., K], [..., K, D] -> [..., K, R]."""
        embedding = self.prev_embedding(prev_ids)
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding

    def step(self, prev_id: Tensor, hidden: Tensor, state: Any, slot: int) -> tuple[Tensor, Any]:
        """[...], [..., D] -> [..., R]; no state."""
        return self.latents(prev_id, hidden), state
