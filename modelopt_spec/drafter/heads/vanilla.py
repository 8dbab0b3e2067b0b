"""DSpark's vanilla Markov head (DSpark paper, section 3.1; DeepSpec's `markov_head`): a low-rank bigram bias.

u_k = W1[x_{k-1}],    logits_k = lm_head(h_k) + W2 u_k
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.config import HeadConfig
from modelopt_spec.drafter.heads.base import CorrectionHead, HeadContext, init_out_zero, register_head

START_STD = 0.2
"""Standard deviation of W1's entries at the start."""


@register_head("vanilla")
class VanillaMarkovHead(CorrectionHead):
    """u_k = W1[x_{k-1}]."""

    def __init__(self, config: HeadConfig, context: HeadContext) -> None:
        super().__init__(config, context)
        self.markov_w1 = nn.Embedding(context.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, context.draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        init_out_zero(self.markov_w2)

    def start_from(self, embedding: Tensor) -> None:
        """W1 = the R leading principal components of the embedding: similar tokens start with similar biases."""
        if self.config.init == "random":
            return
        rank = min(self.config.rank, *embedding.shape)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            centred = embedding.float() - embedding.float().mean(0)
            basis = torch.svd_lowrank(centred, q=rank, niter=4)[2]
            components = centred @ basis
            self.markov_w1.weight[:, :rank] = components / components.std() * START_STD

    @property
    def out(self) -> nn.Linear:
        """W2, [V, R]."""
        return self.markov_w2

    def prev_embedding(self, prev_ids: Tensor) -> Tensor:
        """W1[x_{k-1}], [...] -> [..., R]."""
        return self.markov_w1(prev_ids)

    def latents(self, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., K, R]."""
        return self.prev_embedding(prev_ids)

    def step(self, prev_id: Tensor, hidden: Tensor, state: Any, slot: int) -> tuple[Tensor, Any]:
        """[...] -> [..., R]; no state."""
        return self.prev_embedding(prev_id), state
