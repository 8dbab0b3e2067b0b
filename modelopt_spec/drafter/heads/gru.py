"""Domino's GRU head (Domino paper; SpecForge's `prefix_gru` and `embed_proj`).

g_k = GRU(embed(x_{k-1}), g_{k-1}),    u_k = SiLU(P [h_k; g_k]),    logits_k = lm_head(h_k) + W_out u_k

The first `pure_draft_prefix_len` drafting slots keep their base logits (u = 0); the GRU reads their tokens too.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelopt_spec.config import HeadConfig
from modelopt_spec.drafter.heads.base import CorrectionHead, HeadContext, init_out_zero, register_head


@register_head("gru")
class DominoHead(CorrectionHead):
    """u_k = SiLU(P [h_k; g_k]) with the GRU state g_k."""

    prefix = "domino_head"
    drops_last_slot = True

    def __init__(self, config: HeadConfig, context: HeadContext) -> None:
        super().__init__(config, context)
        width = config.gru_hidden_dim or 2 * config.rank
        self.prefix_gru = nn.GRU(context.hidden_size, width, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(context.hidden_size + width, config.rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.rank, context.draft_vocab_size, bias=False),
        )
        init_out_zero(self.out)

    @property
    def out(self) -> nn.Linear:
        """W_out, [V, R]."""
        return cast(nn.Linear, self.embed_proj[2])

    def prev_embedding(self, prev_ids: Tensor) -> Tensor:
        """The target's embedding of x_{k-1}, [...] -> [..., D]."""
        return self._context.embed(prev_ids).to(self.out.weight.dtype)

    @property
    def prev_embedding_dim(self) -> int:
        """D."""
        return self._context.hidden_size

    def initial_state(self, hidden: Tensor) -> Tensor:
        """G before the first drafting slot: 0, [..., G]."""
        return hidden.new_zeros((*hidden.shape[:-1], self.prefix_gru.hidden_size))

    def latents(self, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """[..., K], [..., K, D] -> [..., K, R]."""
        start = self.first_slot
        corrected = start + self.config.pure_draft_prefix_len
        embeddings = self.prev_embedding(prev_ids[..., start:])
        states = self.prefix_gru(embeddings.flatten(0, -3))[0].view(*embeddings.shape[:-1], -1)
        skip = corrected - start
        u = F.silu(self.embed_proj[0](torch.cat([hidden[..., corrected:, :], states[..., skip:, :]], dim=-1)))
        return F.pad(u, (0, 0, corrected, 0))

    def step(self, prev_id: Tensor, hidden: Tensor, state: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """[...], [..., D], g_{k-1} [..., G] -> u_k [..., R], g_k [..., G]."""
        embedding = self.prev_embedding(prev_id)
        flat = embedding.reshape(-1, 1, embedding.shape[-1])
        _, new = self.prefix_gru(flat, state.reshape(1, flat.shape[0], -1))
        state = new.view(state.shape)
        u = F.silu(self.embed_proj[0](torch.cat([hidden, state], dim=-1)))
        if slot < self.first_slot + self.config.pure_draft_prefix_len:
            u = torch.zeros_like(u)
        return u, state
