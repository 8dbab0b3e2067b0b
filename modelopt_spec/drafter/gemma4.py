"""Gemma-4 layers for the dense backbone, as DeepSpec's drafts for Gemma-4 targets have them.

What differs from a Qwen3-style layer: each sublayer is normalised before and after, values are normalised too (without
a weight) and may share the keys' projection, scores are not scaled, the MLP's activation is gelu, and every layer ends
with a scalar (``layer_scalar``, 1 in published drafts). Embedding scale and logit soft-cap are the target's business.

Legend: B batch, S context positions, N blocks, K slots, D hidden, G kv heads, d head width.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from modelopt_spec.config import BackboneConfig
from modelopt_spec.drafter.attention_plan import BlockAttentionPlan
from modelopt_spec.drafter.dense import DenseDrafter
from modelopt_spec.drafter.layers import DraftAttention, DraftLayer
from modelopt_spec.drafter.norm import Angles, DraftNorm

__all__ = ["Gemma4Attention", "Gemma4Drafter", "Gemma4Layer"]


class Gemma4Attention(DraftAttention):
    """Normalised queries, keys and values; scores are plain dot products."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.scale = 1.0
        self.v_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps, elementwise_affine=False)
        if config.key_is_value:
            del self.v_proj

    def keys_values(self, x: Tensor, cos_sin: Angles) -> tuple[Tensor, Tensor]:
        """[..., D] -> keys (normalised and rotated) and values (normalised), [..., G, d]."""
        k = self._heads(self.k_proj(x))
        v = self._heads(self.v_proj(x)) if hasattr(self, "v_proj") else k
        return self.k_norm(k, cos_sin).to(k.dtype), self.v_norm(v).to(k.dtype)


class Gemma4Layer(DraftLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), times a scalar."""

    layer_scalar: Tensor

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.self_attn = Gemma4Attention(config)
        self.pre_feedforward_layernorm = DraftNorm(config.hidden_size or 0, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = DraftNorm(config.hidden_size or 0, eps=config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        slot_angles: Angles,
        context_angles: Angles,
        plan: BlockAttentionPlan,
    ) -> Tensor:
        """Teacher-forced blocks: x [B, N, K, D], context [B, S, D] -> [B, N, K, D]."""
        return self._after(x, self.self_attn(self.input_layernorm(x), context, slot_angles, context_angles, plan))

    def decode(self, x: Tensor, slot_angles: Angles, k_ctx: Tensor, v_ctx: Tensor, plan: BlockAttentionPlan) -> Tensor:
        """One block for each row: x [B, K, D] against cached keys and values [B, C, G, d] -> [B, K, D]."""
        return self._after(x, self.self_attn.decode(self.input_layernorm(x), slot_angles, k_ctx, v_ctx, plan))

    def _after(self, x: Tensor, attended: Tensor) -> Tensor:
        """Both residuals from the attention's output on."""
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Gemma4Drafter(DenseDrafter):
    """The dense backbone with Gemma-4 layers."""

    layer_class: ClassVar[type[DraftLayer]] = Gemma4Layer
