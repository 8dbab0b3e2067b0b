"""Block attention with one dense masked softmax: slow, large and obviously right.

Legend: B batch, S sequence, N anchors, K slots, H query heads, Hkv key/value heads, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_spec.drafter.attention_plan import BlockAttentionPlan

__all__ = ["block_attention_reference", "visible_keys"]


def visible_keys(plan: BlockAttentionPlan) -> Tensor:
    """Whether each slot sees each key, the S context keys before the N*K slots. [B, N, K, S + N*K] bool."""
    device, slots = plan.anchors.device, plan.block_size
    batch, blocks = plan.anchors.shape
    anchor = plan.anchors.view(batch, blocks, 1, 1)
    query = torch.arange(slots, device=device).view(1, 1, slots, 1)
    position = torch.arange(plan.seq_len, device=device).view(1, 1, 1, -1)
    context = (position >= plan.context_start.view(batch, blocks, 1, 1)) & (position < anchor)
    context = context.expand(batch, blocks, slots, plan.seq_len)

    block = torch.arange(blocks, device=device)
    same_block = block.view(1, blocks, 1, 1, 1) == block.view(1, 1, 1, blocks, 1)
    key = torch.arange(slots, device=device)
    slot = same_block.expand(batch, blocks, slots, blocks, slots)
    if plan.causal:
        slot = slot & (key.view(1, 1, 1, 1, slots) <= query.unsqueeze(-1))
    if plan.window is not None and plan.window_rule == "query":
        context = context & (anchor + query - position < plan.window)
        slot = slot & (query.unsqueeze(-1) - key.view(1, 1, 1, 1, slots) < plan.window)
    elif plan.window is not None:
        context = context & (position >= anchor - plan.window)
    seen = torch.cat([context, slot.flatten(3)], dim=-1)
    return seen & plan.keep.view(batch, blocks, 1, 1)


def block_attention_reference(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    plan: BlockAttentionPlan,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Same arguments and result as :func:`modelopt_spec.drafter.attention.block_attention`, with all scores at once.

    ``softmax([q K^T * scale, sink])`` over the visible keys and the sink, then the weighted sum of the values; the
    sink has no value (attention sinks as in gpt-oss, arXiv 2508.10925).
    """
    repeat = q.shape[3] // k_ctx.shape[2]
    keys = torch.cat([k_ctx, k_blk.flatten(1, 2)], dim=1).repeat_interleave(repeat, dim=2)
    values = torch.cat([v_ctx, v_blk.flatten(1, 2)], dim=1).repeat_interleave(repeat, dim=2)
    scores = torch.einsum("bnkhd,bshd->bnkhs", q, keys) * scale
    seen = visible_keys(plan).unsqueeze(3)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, 1, 1, -1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    # a padding block sees nothing: its row of -inf is replaced before the softmax, its output after it
    padding = ~plan.keep.view(*plan.keep.shape, 1, 1, 1)
    weights = scores.masked_fill(padding, 0.0).softmax(-1)[..., : keys.shape[1]]
    return torch.einsum("bnkhs,bshd->bnkhd", weights, values).masked_fill(padding, 0.0)
