"""Building blocks of the dense backbone: rotary embedding, Qwen3-style attention with injected context, MLP.

Legend: B batch, S context positions, N blocks, K slots, D hidden, H query heads, G kv heads, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from modelopt_spec.config import BackboneConfig
from modelopt_spec.drafter.attention import block_attention, decode_attention
from modelopt_spec.drafter.attention_plan import BlockAttentionPlan
from modelopt_spec.drafter.norm import Angles, DraftNorm

__all__ = ["DraftAttention", "DraftLayer", "Rotary", "qwen3_config"]


def qwen3_config(config: BackboneConfig) -> Qwen3Config:
    """The transformers config of a dense backbone (fully resolved)."""
    settings: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope_parameters or {}),
        "max_position_embeddings": config.max_position_embeddings or 32768,
        "attention_bias": config.attention_bias,
    }
    return Qwen3Config(**settings)


class Rotary(nn.Module):
    """cos and sin of the rotary angles, in float32, or float64 for a float64 drafter."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self._config = config
        self._cached: dict[torch.device, Tensor] = {}
        self.scaling = 1.0

    def _frequencies(self, device: torch.device) -> Tensor:
        """Inverse frequencies [d/2]. Computed when first needed: nothing to lose on a meta device."""
        if device not in self._cached:
            parameters = self._config.rope_parameters or {}
            if parameters.get("rope_type", "default") == "default":
                width = self._config.head_dim or 0
                exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
                frequencies = 1.0 / float(parameters["rope_theta"]) ** exponent
            else:
                init = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
                frequencies, self.scaling = init(qwen3_config(self._config), torch.device("cpu"))
            self._cached[device] = frequencies.to(device)
        return self._cached[device]

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Positions [...] -> cos, sin [..., d] in the given dtype."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        angles = positions.to(exact).unsqueeze(-1) * self._frequencies(positions.device).to(exact)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


class DraftAttention(nn.Module):
    """Attention from block slots to target features, injected as keys and values, and to their own block."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim or 0
        self.scale = self.head_dim**-0.5
        heads, kv_heads = config.num_attention_heads or 0, config.num_key_value_heads or 0
        width, bias = config.hidden_size or 0, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=bias)
        self.q_norm = DraftNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = DraftNorm(self.head_dim, eps=config.rms_norm_eps)
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.attention_sink else None

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def queries(self, x: Tensor, cos_sin: Angles) -> Tensor:
        """[..., D] -> [..., H, d], normalised and rotated, in the projection's type (also under autocast)."""
        q = self._heads(self.q_proj(x))
        return self.q_norm(q, cos_sin).to(q.dtype)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        slot_angles: Angles,
        context_angles: Angles,
        plan: BlockAttentionPlan,
    ) -> Tensor:
        """Normed slots of teacher-forced blocks [B, N, K, D], context [B, S, D] -> [B, N, K, D]."""
        k_ctx, v_ctx = self.keys_values(context, context_angles)
        k_blk, v_blk = self.keys_values(x, slot_angles)
        q = self.queries(x, slot_angles)
        with torch.autocast(q.device.type, enabled=False):
            mixed = block_attention(q, k_ctx, v_ctx, k_blk, v_blk, plan, scale=self.scale, sinks=self.sinks)
        return self.o_proj(mixed.flatten(-2))

    def decode(self, x: Tensor, slot_angles: Angles, k_ctx: Tensor, v_ctx: Tensor, plan: BlockAttentionPlan) -> Tensor:
        """One normed block for each row [B, K, D] against cached keys and values [B, C, G, d] -> [B, K, D]."""
        k_blk, v_blk = self.keys_values(x, slot_angles)
        q = self.queries(x, slot_angles)
        with torch.autocast(q.device.type, enabled=False):
            mixed = decode_attention(q, k_ctx, v_ctx, k_blk, v_blk, plan, scale=self.scale, sinks=self.sinks)
        return self.o_proj(mixed.flatten(-2))

    def keys_values(self, x: Tensor, cos_sin: Angles) -> tuple[Tensor, Tensor]:
        """[..., D] -> keys (normalised and rotated) and values, [..., G, d]. The same for context and slots."""
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        return self.k_norm(k, cos_sin).to(v.dtype), v


class DraftLayer(nn.Module):
    """Pre-norm layer; the context features are not normalised again, the slots are."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp: nn.Module = Qwen3MLP(qwen3_config(config))
        self.input_layernorm = DraftNorm(config.hidden_size or 0, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DraftNorm(config.hidden_size or 0, eps=config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        slot_angles: Angles,
        context_angles: Angles,
        plan: BlockAttentionPlan,
    ) -> Tensor:
        """Teacher-forced blocks: x [B, N, K, D], context [B, S, D] -> [B, N, K, D]."""
        x = x + self.self_attn(self.input_layernorm(x), context, slot_angles, context_angles, plan)
        return x + self.mlp(self.post_attention_layernorm(x))

    def decode(self, x: Tensor, slot_angles: Angles, k_ctx: Tensor, v_ctx: Tensor, plan: BlockAttentionPlan) -> Tensor:
        """One block for each row: x [B, K, D] against cached keys and values [B, C, G, d] -> [B, K, D]."""
        x = x + self.self_attn.decode(self.input_layernorm(x), slot_angles, k_ctx, v_ctx, plan)
        return x + self.mlp(self.post_attention_layernorm(x))
