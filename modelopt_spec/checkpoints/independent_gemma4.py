"""The independent reading of a draft with Gemma-4 layers: see ``independent_reader``.

Legend: C context positions, K slots, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelopt_spec.checkpoints.independent_reader import IndependentDraft

__all__ = ["IndependentGemma4Draft"]


class IndependentGemma4Draft(IndependentDraft):
    """Four norms a layer, normalised values, unscaled scores, gelu, and a scalar at each layer's end."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        shared = bool(config.get("attention_k_eq_v"))
        heads = config["num_global_key_value_heads"] if shared else config["num_key_value_heads"]
        rope = dict(config["rope_parameters"]["full_attention"])
        shape = {
            **config,
            "head_dim": config["global_head_dim"],
            "num_key_value_heads": heads,
            "rope_parameters": rope,
            "hidden_act": "silu",
        }
        super().__init__(shape, tensors, dtype)
        self.shared, self.rope = shared, rope

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate [n, heads, d]: the first share of the frequencies, taken as if all of the head rotated."""
        pairs = self.head_dim // 2
        share = float(self.rope.get("partial_rotary_factor") or 1.0)
        rotating = int(share * self.head_dim // 2)
        exponent = torch.arange(pairs, dtype=torch.float64) * 2 / self.head_dim
        frequencies = float(self.rope["rope_theta"]) ** -exponent / float(self.rope.get("factor") or 1.0)
        frequencies = torch.where(torch.arange(pairs) < rotating, frequencies, 0.0)
        angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
        cos, sin = angles.cos().to(self.dtype).unsqueeze(1), angles.sin().to(self.dtype).unsqueeze(1)
        low, high = x[..., :pairs], x[..., pairs:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def _attention(self, layer: str, x: Tensor, context: Tensor, visible: Tensor) -> Tensor:
        """Normed slots x [K, D], context [C, D], visible [K, C+K] -> [K, D]."""
        count, slots = context.shape[0], x.shape[0]
        both, positions = torch.cat([context, x]), torch.arange(context.shape[0] + x.shape[0])
        q = self._project(layer, "q", x).view(slots, self.heads, self.head_dim)
        k = self._project(layer, "k", both).view(-1, self.kv_heads, self.head_dim)
        v = k if self.shared else self._project(layer, "v", both).view(-1, self.kv_heads, self.head_dim)
        q = self._rope(self._norm(q, self._weight(f"{layer}.self_attn.q_norm.weight")), positions[count:])
        k = self._rope(self._norm(k, self._weight(f"{layer}.self_attn.k_norm.weight")), positions)
        v = self._norm(v, torch.ones(self.head_dim, dtype=self.dtype))
        mixed = []
        for head in range(self.heads):
            group = head * self.kv_heads // self.heads
            scores = (q[:, head] @ k[:, group].T).masked_fill(~visible, float("-inf"))
            mixed.append(scores.softmax(-1) @ v[:, group])
        return self._project(layer, "o", torch.cat(mixed, dim=-1))

    def hidden(self, taps: Tensor, block: Tensor, window_rule: str) -> Tensor:
        """Features [C, T*D_target] and an embedded block [K, D] -> [K, D] after the final norm."""

        def norm(name: str, x: Tensor) -> Tensor:
            return self._norm(x, self._weight(f"{name}.weight"))

        context = norm("hidden_norm", F.linear(taps.to(self.dtype), self._weight("fc.weight")))
        visible, x = self._visible(taps.shape[0], window_rule), block.to(self.dtype)
        for index in range(self.num_layers):
            layer = f"layers.{index}"
            attended = self._attention(layer, norm(f"{layer}.input_layernorm", x), context, visible)
            x = x + norm(f"{layer}.post_attention_layernorm", attended)
            normed = norm(f"{layer}.pre_feedforward_layernorm", x)
            gate, up = (F.linear(normed, self._weight(f"{layer}.mlp.{part}_proj.weight")) for part in ("gate", "up"))
            mlp = F.linear(F.gelu(gate, approximate="tanh") * up, self._weight(f"{layer}.mlp.down_proj.weight"))
            x = (x + norm(f"{layer}.post_feedforward_layernorm", mlp)) * self._weight(f"{layer}.layer_scalar")
        return norm("norm", x)
