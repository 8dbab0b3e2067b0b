"""Block attention on groups of neighbouring blocks: products for visible cells only, nothing of size N*K*S kept.

With base-2 scores ``s`` of a row, its maximum ``m``, ``e = 2^(s - m)`` and ``l = sum(e)`` (plus ``2^(sink - m)``: the
sink has no value) the output is ``o = e V / l``. Backward, with ``g = do / l`` and ``D = rowsum(g * o)``:

    dV = e^T g,    dS = e * (g V^T - D),    dQ = scale * dS K,    dK = scale * dS^T Q,    dsink = -sum(2^(sink - m) D)

(softmax attention differentiated through its row statistics, as in FlashAttention, arXiv 2205.14135, section 3.1).
Only ``m`` and ``1 / l`` are kept for it; ``e`` is recomputed, but for the first tiles that fit into a fixed budget.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.drafter.attention_plan import BlockAttentionPlan
from modelopt_spec.drafter.attention_tiles import Tiles

__all__ = ["KEEP_BYTES", "grouped_block_attention"]

KEEP_BYTES = 4 << 20
"""Bytes of tiles kept from forward to backward, per call."""

LOG2_E = math.log2(math.e)


def grouped_block_attention(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    plan: BlockAttentionPlan,
    *,
    scale: float,
    sinks: Tensor | None = None,
    keep_bytes: int = KEEP_BYTES,
) -> Tensor:
    """Same arguments and result as :func:`modelopt_spec.drafter.attention.block_attention`.

    Half precision inputs are computed in float32 and rounded once. ``keep_bytes`` bounds what is kept of the
    probabilities for the backward pass: 0 recomputes all of them, which costs a sixth more products.
    """
    trains = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k_ctx, v_ctx, k_blk, v_blk, sinks)
    )
    q, k_blk, v_blk = (plan.sort(x).contiguous() for x in (q, k_blk, v_blk))
    out = _GroupedAttention.apply(q, k_ctx, v_ctx, k_blk, v_blk, sinks, plan, scale, keep_bytes if trains else 0)
    return plan.unsort(out)


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k_ctx: Tensor,
        v_ctx: Tensor,
        k_blk: Tensor,
        v_blk: Tensor,
        sinks: Tensor | None,
        plan: BlockAttentionPlan,
        scale: float,
        keep_bytes: int,
    ) -> Tensor:
        tiles = Tiles(q, k_ctx, plan)
        out = torch.zeros_like(q)
        stats = q.new_empty(2, q.shape[0], tiles.kv_heads, tiles.rows(q.shape[1]), 1, dtype=tiles.dtype)
        sink = tiles.sink_rows(sinks, LOG2_E)
        scratch = tiles.scratch()
        kept: list[Tensor] = []
        for row, groups in enumerate(tiles.groups):
            keys, values = tiles.context(k_ctx, row), tiles.context(v_ctx, row)
            for group in groups:
                nbytes = tiles.elements(group) * scratch.element_size()
                keep = nbytes <= keep_bytes
                keep_bytes = keep_bytes - nbytes if keep else 0
                tile = tiles.tile(group, torch.empty_like(scratch[: tiles.elements(group)]) if keep else scratch)
                if keep:
                    kept.append(tile)
                highest, inverse = stats[:, row, :, group.rows]
                queries = tiles.gather(q, row, group).mul_(scale * LOG2_E)
                tiles.write_scores(tile, queries, keys, tiles.gather_slots(k_blk, row, group), group)
                tiles.hide(tile, group)
                torch.amax(tile, -1, keepdim=True, out=highest)
                if sink is not None:
                    torch.maximum(highest, sink[:, : tile.shape[1]], out=highest)
                torch.sum(tile.sub_(highest).exp2_(), -1, keepdim=True, out=inverse)
                if sink is not None:
                    inverse += (sink[:, : tile.shape[1]] - highest).exp2_()
                inverse.reciprocal_()
                mixed = tiles.mix(tile, values, tiles.gather_slots(v_blk, row, group), group)
                tiles.scatter(mixed.mul_(inverse), out, row, group)
        ctx.save_for_backward(q, k_ctx, v_ctx, k_blk, v_blk, sinks, out, stats, *kept)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k_ctx, v_ctx, k_blk, v_blk, sinks, out, stats, *kept = ctx.saved_tensors
        tiles = Tiles(q, k_ctx, ctx.plan)
        grad_out = grad_out.contiguous()
        grad_q, grad_kb, grad_vb = (torch.zeros_like(x) for x in (q, k_blk, v_blk))
        grad_k, grad_v = (torch.zeros(x.shape, dtype=tiles.dtype, device=x.device) for x in (k_ctx, v_ctx))
        sink = tiles.sink_rows(sinks, LOG2_E)
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=tiles.dtype)
        scratch, grad_scratch = tiles.scratch(skip=len(kept)), tiles.scratch()
        recall = iter(kept)
        for row, groups in enumerate(tiles.groups):
            keys, values = tiles.context(k_ctx, row), tiles.context(v_ctx, row)
            keys_grad, values_grad = grad_k[row].transpose(0, 1), grad_v[row].transpose(0, 1)
            for group in groups:
                highest, inverse = stats[:, row, :, group.rows]
                queries = tiles.gather(q, row, group).mul_(ctx.scale * LOG2_E)
                block_keys = tiles.gather_slots(k_blk, row, group)
                tile = next(recall, None)
                if tile is None:
                    tile = tiles.tile(group, scratch)
                    tiles.write_scores(tile, queries, keys, block_keys, group)
                    tiles.hide(tile, group)
                    tile.sub_(highest).exp2_()
                grad = tiles.gather(grad_out, row, group).mul_(inverse)
                shift = tiles.row_dots(grad_out, out, row, group).mul_(inverse)
                tiles.scatter_slots(tiles.add_to_keys(tile, grad, values_grad, group), grad_vb, row, group)

                grad_tile = tiles.tile(group, grad_scratch)
                tiles.write_scores(grad_tile, grad, values, tiles.gather_slots(v_blk, row, group), group)
                tiles.fill_holes(grad_tile, group, 0.0)
                grad_tile.sub_(shift).mul_(tile)
                tiles.scatter(tiles.mix(grad_tile, keys, block_keys, group).mul_(ctx.scale), grad_q, row, group)
                own = tiles.add_to_keys(grad_tile, queries, keys_grad, group)
                tiles.scatter_slots(own.div_(LOG2_E), grad_kb, row, group)
                if sink is not None:
                    weight = (sink[:, : tile.shape[1]] - highest).exp2_()
                    grad_sinks -= weight.mul_(shift).view(tiles.kv_heads, -1, tiles.repeat).sum(1).flatten()
        grad_k.div_(LOG2_E)
        if grad_sinks is not None:
            grad_sinks = grad_sinks.to(sinks.dtype)
        grad_k, grad_v = grad_k.to(k_ctx.dtype), grad_v.to(v_ctx.dtype)
        return grad_q, grad_k, grad_v, grad_kb, grad_vb, grad_sinks, None, None, None
