"""The dense backbone of DFlash, DSpark and Domino drafters: Qwen3-style layers over injected target features.

Legend: B batch, S context positions, N blocks, K slots, D hidden, T taps.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from modelopt_spec.config import DrafterConfig
from modelopt_spec.drafter.attention import plan_decode
from modelopt_spec.drafter.cache import ContextCache
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.drafter.layers import DraftLayer, Rotary
from modelopt_spec.drafter.norm import DraftNorm
from modelopt_spec.records import BlockBatch

__all__ = ["DenseDrafter"]


START_SCALE = 0.3
"""Start of the final norm's weight: near-flat logits. At 1 the residual of an untrained draft predicts its own input
token with certainty wherever embedding and output projection are tied; hundreds of steps go into unlearning that."""


class DenseDrafter(Drafter):
    """context = hidden_norm(fc(taps)); L pre-norm layers over the slots; hidden = norm(x)."""

    layer_class: ClassVar[type[DraftLayer]] = DraftLayer

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        backbone = config.backbone
        width, eps = backbone.hidden_size or 0, backbone.rms_norm_eps
        taps = len(config.target_layer_ids or ())
        self.fc = nn.Linear(taps * (config.target_hidden_size or 0), width, bias=False)
        self.hidden_norm = DraftNorm(width, eps=eps)
        self.layers = nn.ModuleList(self.layer_class(backbone) for _ in range(backbone.num_layers or 0))
        self.norm = DraftNorm(width, eps=eps)
        nn.init.constant_(self.norm.weight, START_SCALE)
        self.rotary = Rotary(backbone)
        for module in self.modules():
            if isinstance(module, nn.Linear) and not module.weight.is_meta:
                nn.init.normal_(module.weight, std=0.02)
        self.add_heads()

    def context(self, taps: Tensor) -> Tensor:
        """hidden_norm(fc(taps)), [B, S, T*D_target] -> [B, S, D]."""
        return self.hidden_norm(self.fc(taps.to(self.dtype)))

    def encode(self, context: Tensor, blocks: BlockBatch, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, S, D] context and teacher-forced blocks -> hidden [B, N, K, D], twice."""
        length = context.shape[1]
        plan = self.plan_attention(blocks, length)
        if position_ids is None:
            position_ids = torch.arange(length, device=context.device).expand(context.shape[0], -1)
        slot_angles = self.rotary(blocks.position_ids, context.dtype)
        context_angles = self.rotary(position_ids, context.dtype)
        x = self._enter(self.embed(blocks.input_ids))
        for layer in self.layers:
            x = self.run_layer(layer, x, context, slot_angles, context_angles, plan)
        hidden = self.norm(self._leave(x))
        return hidden, hidden

    def _enter(self, x: Tensor) -> Tensor:
        """Embedded slots [..., D] -> what the layers take."""
        return x

    def _leave(self, x: Tensor) -> Tensor:
        """What the layers give -> [..., D]."""
        return x

    def _draft_layers(self) -> list[DraftLayer]:
        return cast(list[DraftLayer], list(self.layers))

    def new_cache(self, batch_size: int) -> ContextCache:
        """Empty keys and values for B rows."""
        return ContextCache(len(self.layers), batch_size, self.device)

    def extend(self, cache: ContextCache, taps: Tensor, counts: Tensor | None = None) -> None:
        """Project [B, n, T*D_target] features of newly committed positions into every layer's keys and values."""
        context = self.context(taps)
        n = context.shape[1]
        angles = self.rotary(cache.new_positions(n), context.dtype)
        for index, layer in enumerate(self._draft_layers()):
            cache.write(index, *layer.self_attn.keys_values(context, angles))
        cache.advance(cache.lengths.new_full(cache.lengths.shape, n) if counts is None else counts)

    def decode(self, cache: ContextCache, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[B, K] ids at positions lengths[b] .. -> hidden [B, K, D], twice."""
        backbone = self.config.backbone
        x = self._enter(self.embed(input_ids))
        angles = self.rotary(cache.new_positions(input_ids.shape[1]), x.dtype)
        plan = plan_decode(
            cache.lengths,
            block_size=input_ids.shape[1],
            context_len=cache.longest,
            causal=backbone.causal,
            window=backbone.sliding_window,
            window_rule=backbone.window_rule,
        )
        for index, layer in enumerate(self._draft_layers()):
            x = layer.decode(x, angles, *cache.read(index), plan)
        hidden = self.norm(self._leave(x))
        return hidden, hidden
