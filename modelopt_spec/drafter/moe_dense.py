"""Dense Qwen3-style layers with hyper-connections around them, experts inside of them, or both.

The dense backbone otherwise: same attention, same names; `attn_hc`, `ffn_hc` and `hc_head` come on top, and `mlp`
becomes router, experts and shared expert. With fresh hyper-connections the function is that of the plain network.

Legend: B batch, S context positions, N blocks, K slots, n streams, D hidden, G kv heads, d head width.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from modelopt_spec.config import BackboneConfig, DrafterConfig
from modelopt_spec.drafter.attention_plan import BlockAttentionPlan
from modelopt_spec.drafter.dense import DenseDrafter
from modelopt_spec.drafter.hyper_connections import HyperConnection, PlainResidual, StreamCollapse
from modelopt_spec.drafter.layers import DraftLayer
from modelopt_spec.drafter.moe import MoE, RoutingStats
from modelopt_spec.drafter.moe_training import RoutedTraining
from modelopt_spec.records import BlockBatch

__all__ = ["MixedDenseDrafter", "MixedLayer"]


class MixedLayer(DraftLayer):
    """A dense layer whose two residual connections and MLP are exchangeable."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        width, eps = config.hidden_size or 0, config.rms_norm_eps or 1e-6
        if config.moe is not None:
            self.mlp = MoE(config.moe, width)
        self.attn_hc: HyperConnection | PlainResidual = PlainResidual()
        self.ffn_hc: HyperConnection | PlainResidual = PlainResidual()
        if config.hyper_connection is not None:
            self.attn_hc = HyperConnection(config.hyper_connection, width, eps)
            self.ffn_hc = HyperConnection(config.hyper_connection, width, eps)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        context: Tensor,
        slot_angles: tuple[Tensor, Tensor],
        context_angles: tuple[Tensor, Tensor],
        plan: BlockAttentionPlan,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Teacher-forced blocks: x [B, N, K, (n,) D], context [B, S, D] -> the same and what the router did."""
        inner, mixing = self.attn_hc(x)
        attended = self.self_attn(self.input_layernorm(inner), context, slot_angles, context_angles, plan)
        x = self.attn_hc.merge(x, attended, mixing)
        valid = plan.keep.unsqueeze(-1).expand(inner.shape[:-1])
        return self._feed_forward(x, valid)

    def decode(
        self, x: Tensor, slot_angles: tuple[Tensor, Tensor], k_ctx: Tensor, v_ctx: Tensor, plan: BlockAttentionPlan
    ) -> Tensor:
        """One block for each row: x [B, K, (n,) D] against cached keys and values [B, C, G, d] -> the same."""
        inner, mixing = self.attn_hc(x)
        attended = self.self_attn.decode(self.input_layernorm(inner), slot_angles, k_ctx, v_ctx, plan)
        return self._feed_forward(self.attn_hc.merge(x, attended, mixing), None)[0]

    def _feed_forward(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, RoutingStats | None]:
        inner, mixing = self.ffn_hc(x)
        normed, stats = self.post_attention_layernorm(inner), None
        if isinstance(self.mlp, MoE):
            out, stats = self.mlp(normed, valid)
        else:
            out = self.mlp(normed)
        return self.ffn_hc.merge(x, out, mixing), stats


class MixedDenseDrafter(RoutedTraining, DenseDrafter):
    """The dense drafter with ``residual: mhc`` and/or ``mlp: moe``."""

    layer_class: ClassVar[type[DraftLayer]] = MixedLayer

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        backbone = config.backbone
        self.hc_head: StreamCollapse | None = None
        if backbone.hyper_connection is not None:
            self.hc_head = StreamCollapse(
                backbone.hyper_connection, backbone.hidden_size or 0, backbone.rms_norm_eps or 1e-6
            )
        self._passed: list[RoutingStats] = []

    def encode(self, context: Tensor, blocks: BlockBatch, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """As the dense drafter; ``routing`` holds what the routers did afterwards."""
        self._passed = []
        hidden = super().encode(context, blocks, position_ids)
        self.routing, self._passed = tuple(self._passed), []
        return hidden

    def run_layer(self, layer: nn.Module, *inputs: Any) -> Tensor:
        """One layer; its router's work is noted."""
        x, stats = super().run_layer(layer, *inputs)
        if stats is not None:
            self._passed.append(stats)
        return x

    def _enter(self, x: Tensor) -> Tensor:
        return x if self.hc_head is None else x.unsqueeze(-2).expand(*x.shape[:-1], self.hc_head.n, x.shape[-1])

    def _leave(self, x: Tensor) -> Tensor:
        return x if self.hc_head is None else self.hc_head(x)
