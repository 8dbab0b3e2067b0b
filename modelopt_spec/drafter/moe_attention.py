"""DeepSeek-V4's uncompressed attention as a block drafter uses it: one key/value head, injected context, sinks.

    q  = rope(norm(wq_b(q_norm(wq_a(x)))))          [H, d], the norm has no weight, one factor a head
    kv = rope(kv_norm(wkv(x)))                      [d], key and value at once, the same for context and slots
    o  = rope_inverse(softmax([q kv^T / sqrt(d), sink]) kv)
    out = wo_b(concat_g wo_a[g](heads of group g))

The rotation turns neighbouring pairs of the last ``qk_rope_head_dim`` channels. Keys are values too, so values arrive
rotated by their own position; turning the output back by the query's position leaves their relative distance. The
projections and their names are those of transformers' ``DeepseekV4Attention``.

Legend: B batch, S context positions, N blocks, K slots, D hidden, H query heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

from modelopt_spec.config import BackboneConfig
from modelopt_spec.drafter.attention import block_attention, decode_attention
from modelopt_spec.drafter.attention_plan import BlockAttentionPlan
from modelopt_spec.drafter.norm import DraftNorm

__all__ = ["InterleavedRotary", "LatentAttention", "rotate_pairs"]


class InterleavedRotary(nn.Module):
    """cos and sin [..., r/2] of the rotary angles, one for each neighbouring pair of the r rotated channels."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        latent = config.latent_attention
        self.width = (latent.qk_rope_head_dim if latent else None) or 0
        self.theta = float((config.rope_parameters or {})["rope_theta"])

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [...] -> cos, sin [..., r/2], in float32, or float64 for a float64 drafter."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        exponent = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.width
        angles = positions.unsqueeze(-1).to(exact) * (self.theta**-exponent).to(exact)
        return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, cos_sin: tuple[Tensor, Tensor], *, inverse: bool = False) -> Tensor:
    """Turn the last r channels of heads [..., H, d] by angles [..., r/2]; the channels before them stay."""
    cos, sin = (part.unsqueeze(-2) for part in cos_sin)
    if inverse:
        sin = -sin
    still, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    even, odd = turned.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([still, pairs.flatten(-2).to(x.dtype)], dim=-1)


class LatentAttention(nn.Module):
    """Attention from block slots to injected context and to their own block."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        latent = config.latent_attention
        assert latent is not None
        width, eps = config.hidden_size or 0, config.rms_norm_eps or 1e-6
        heads, self.head_dim = config.num_attention_heads or 0, config.head_dim or 0
        rank, groups, group_rank = latent.q_lora_rank or 0, latent.o_groups or 1, latent.o_lora_rank or 0
        self.eps, self.groups, self.scale = eps, groups, self.head_dim**-0.5
        self.q_a_proj = nn.Linear(width, rank, bias=False)
        self.q_a_norm = DraftNorm(rank, eps=eps)
        self.q_b_proj = nn.Linear(rank, heads * self.head_dim, bias=False)
        self.kv_proj = nn.Linear(width, self.head_dim, bias=False)
        self.kv_norm = DraftNorm(self.head_dim, eps=eps)
        self.o_a_proj = DeepseekV4GroupedLinear(heads * self.head_dim // groups, groups * group_rank, groups)
        self.o_b_proj = nn.Linear(groups * group_rank, width, bias=False)
        self.sinks = nn.Parameter(torch.zeros(heads))

    no_weight_decay = ("sinks",)

    def queries(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """[..., D] -> [..., H, d], normalised and rotated."""
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))).unflatten(-1, (-1, self.head_dim))
        return rotate_pairs(F.rms_norm(q, (self.head_dim,), eps=self.eps).to(q.dtype), cos_sin)

    def keys(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """[..., D] -> [..., 1, d], normalised and rotated: keys and values at once, of context and slots alike."""
        kv = self.kv_proj(x)
        return rotate_pairs(self.kv_norm(kv).to(kv.dtype).unsqueeze(-2), cos_sin)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        slot_angles: tuple[Tensor, Tensor],
        context_angles: tuple[Tensor, Tensor],
        plan: BlockAttentionPlan,
    ) -> Tensor:
        """Normed slots [B, N, K, D] and context features [B, S, D] -> [B, N, K, D]."""
        q, mine, theirs = self.queries(x, slot_angles), self.keys(x, slot_angles), self.keys(context, context_angles)
        with torch.autocast(q.device.type, enabled=False):
            sinks = self.sinks.to(q.dtype)
            mixed = block_attention(q, theirs, theirs, mine, mine, plan, scale=self.scale, sinks=sinks)
        return self._output(mixed, slot_angles)

    def decode(self, x: Tensor, slot_angles: tuple[Tensor, Tensor], cached: Tensor, plan: BlockAttentionPlan) -> Tensor:
        """One normed block a row [B, K, D] against cached keys [B, C, 1, d] -> [B, K, D]."""
        q, mine = self.queries(x, slot_angles), self.keys(x, slot_angles)
        with torch.autocast(q.device.type, enabled=False):
            sinks = self.sinks.to(q.dtype)
            mixed = decode_attention(q, cached, cached, mine, mine, plan, scale=self.scale, sinks=sinks)
        return self._output(mixed, slot_angles)

    def _output(self, mixed: Tensor, slot_angles: tuple[Tensor, Tensor]) -> Tensor:
        """Attention output [..., H, d] -> [..., D]."""
        turned = rotate_pairs(mixed, slot_angles, inverse=True)
        return self.o_b_proj(self.o_a_proj(turned.flatten(-2).unflatten(-1, (self.groups, -1))).flatten(-2))
