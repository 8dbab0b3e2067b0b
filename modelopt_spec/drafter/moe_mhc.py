"""The DeepSeek-V4 backbone: stages of windowed attention and experts on n hyper-connected residual streams.

    context   = main_norm(main_proj(taps))                     injected as keys (and values) into every stage
    streams   = n copies of the slots' embeddings
    streams   = stage_i(streams, context)                      i = 1 .. L
    h         = collapse(streams)                              what the confidence head reads
    hidden    = norm(h)                                        what the output projection reads

(DSpark paper, section 5.1; the layout that DeepSeek-V4 checkpoints carry under ``mtp.*``.)

Legend: B batch, S context positions, N blocks, K slots, n streams, D hidden, T taps, L stages.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from modelopt_spec.config import DrafterConfig
from modelopt_spec.drafter.attention import plan_decode
from modelopt_spec.drafter.cache import ContextCache
from modelopt_spec.drafter.dense import START_SCALE
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.drafter.hyper_connections import StreamCollapse
from modelopt_spec.drafter.moe_attention import InterleavedRotary
from modelopt_spec.drafter.moe_stage import MoEStage
from modelopt_spec.drafter.moe_training import RoutedTraining
from modelopt_spec.drafter.norm import DraftNorm
from modelopt_spec.records import BlockBatch

__all__ = ["MoEMHCDrafter"]


class MoEMHCDrafter(RoutedTraining, Drafter):
    """Stages under ``layers.i`` with the names of transformers' ``deepseek_v4``; ``hc_head`` collapses the streams."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        backbone = config.backbone
        assert backbone.hyper_connection is not None
        width, eps = backbone.hidden_size or 0, backbone.rms_norm_eps or 1e-6
        self.streams = backbone.hyper_connection.streams or 1
        taps = len(config.target_layer_ids or ())
        self.main_proj = nn.Linear(taps * (config.target_hidden_size or 0), width, bias=False)
        self.main_norm = DraftNorm(width, eps=eps)
        self.layers = nn.ModuleList(MoEStage(backbone) for _ in range(backbone.num_layers or 0))
        self.hc_head = StreamCollapse(backbone.hyper_connection, width, eps)
        self.norm = DraftNorm(width, eps=eps)
        nn.init.constant_(self.norm.weight, START_SCALE)
        self.rotary = InterleavedRotary(backbone)
        for module in self.modules():
            if isinstance(module, nn.Linear) and not module.weight.is_meta:
                nn.init.normal_(module.weight, std=0.02)
        self.add_heads(confidence_bias=False)

    def _stages(self) -> list[MoEStage]:
        return cast(list[MoEStage], list(self.layers))

    def context(self, taps: Tensor) -> Tensor:
        """main_norm(main_proj(taps)), [B, S, T*D_target] -> [B, S, D]."""
        return self.main_norm(self.main_proj(taps.to(self.dtype)))

    def _enter(self, ids: Tensor) -> Tensor:
        """Ids [...] -> n equal streams [..., n, D]."""
        return self.embed(ids).unsqueeze(-2).expand(*ids.shape, self.streams, -1)

    def _leave(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Streams [..., n, D] -> hidden for the logits, and the collapsed hidden before the norm, [..., D]."""
        collapsed = self.hc_head(streams)
        return self.norm(collapsed), collapsed

    def encode(self, context: Tensor, blocks: BlockBatch, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, S, D] context and teacher-forced blocks -> hidden and confidence hidden, [B, N, K, D]."""
        length = context.shape[1]
        plan = self.plan_attention(blocks, length)
        if position_ids is None:
            position_ids = torch.arange(length, device=context.device).expand(context.shape[0], -1)
        slot_angles = self.rotary(blocks.position_ids, context.dtype)
        context_angles = self.rotary(position_ids, context.dtype)
        streams, routing = self._enter(blocks.input_ids), []
        for stage in self._stages():
            streams, stats = self.run_layer(stage, streams, context, slot_angles, context_angles, plan)
            routing.append(stats)
        self.routing = tuple(routing)
        return self._leave(streams)

    def new_cache(self, batch_size: int) -> ContextCache:
        """Empty keys for B rows; they are the values too, so none are stored beside them."""
        return ContextCache(len(self.layers), batch_size, self.device)

    def extend(self, cache: ContextCache, taps: Tensor, counts: Tensor | None = None) -> None:
        """Project [B, n, T*D_target] features of newly committed positions into every stage's keys."""
        context = self.context(taps)
        n = context.shape[1]
        angles = self.rotary(cache.new_positions(n), context.dtype)
        for index, stage in enumerate(self._stages()):
            keys = stage.self_attn.keys(context, angles)
            cache.write(index, keys, keys[..., :0])
        cache.advance(cache.lengths.new_full(cache.lengths.shape, n) if counts is None else counts)

    def decode(self, cache: ContextCache, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[B, K] ids at positions lengths[b] .. -> hidden and confidence hidden, [B, K, D]."""
        backbone = self.config.backbone
        streams = self._enter(input_ids)
        angles = self.rotary(cache.new_positions(input_ids.shape[1]), streams.dtype)
        plan = plan_decode(
            cache.lengths,
            block_size=input_ids.shape[1],
            context_len=cache.longest,
            causal=backbone.causal,
            window=backbone.sliding_window,
            window_rule=backbone.window_rule,
        )
        for index, stage in enumerate(self._stages()):
            streams = stage.decode(streams, angles, cache.read(index)[0], plan)
        return self._leave(streams)
