"""One stage of the DeepSeek-V4 drafter: attention and experts, each read from and written to n residual streams.

Legend: B batch, S context positions, N blocks, K slots, n streams, D hidden, d head width.
"""

from __future__ import annotations

from torch import Tensor, nn

from modelopt_spec.config import BackboneConfig
from modelopt_spec.drafter.attention_plan import BlockAttentionPlan
from modelopt_spec.drafter.hyper_connections import HyperConnection
from modelopt_spec.drafter.moe import MoE, RoutingStats
from modelopt_spec.drafter.moe_attention import LatentAttention
from modelopt_spec.drafter.norm import DraftNorm

__all__ = ["MoEStage"]


class MoEStage(nn.Module):
    """hyper-connection -> norm -> attention, then hyper-connection -> norm -> experts; names as in transformers."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        assert config.moe is not None and config.hyper_connection is not None
        width, eps = config.hidden_size or 0, config.rms_norm_eps or 1e-6
        self.self_attn = LatentAttention(config)
        self.mlp = MoE(config.moe, width)
        self.input_layernorm = DraftNorm(width, eps=eps)
        self.post_attention_layernorm = DraftNorm(width, eps=eps)
        self.attn_hc = HyperConnection(config.hyper_connection, width, eps)
        self.ffn_hc = HyperConnection(config.hyper_connection, width, eps)

    def forward(
        self,
        streams: Tensor,
        context: Tensor,
        slot_angles: tuple[Tensor, Tensor],
        context_angles: tuple[Tensor, Tensor],
        plan: BlockAttentionPlan,
    ) -> tuple[Tensor, RoutingStats]:
        """Teacher-forced blocks: streams [B, N, K, n, D], context [B, S, D] -> new streams and the router's work.

        Padding blocks take part in the arithmetic but not in the router's statistics.
        """
        x, mixing = self.attn_hc(streams)
        attended = self.self_attn(self.input_layernorm(x), context, slot_angles, context_angles, plan)
        streams = self.attn_hc.merge(streams, attended, mixing)
        valid = plan.keep.unsqueeze(-1).expand(streams.shape[:-2])
        return self._experts(streams, valid)

    def decode(
        self, streams: Tensor, slot_angles: tuple[Tensor, Tensor], cached: Tensor, plan: BlockAttentionPlan
    ) -> Tensor:
        """One block a row: streams [B, K, n, D], cached keys [B, C, 1, d] -> [B, K, n, D]."""
        x, mixing = self.attn_hc(streams)
        attended = self.self_attn.decode(self.input_layernorm(x), slot_angles, cached, plan)
        return self._experts(self.attn_hc.merge(streams, attended, mixing), None)[0]

    def _experts(self, streams: Tensor, valid: Tensor | None) -> tuple[Tensor, RoutingStats]:
        x, mixing = self.ffn_hc(streams)
        out, stats = self.mlp(self.post_attention_layernorm(x), valid)
        return self.ffn_hc.merge(streams, out, mixing), stats
