"""Block attention of a drafter: every block sees the context before its anchor and its own slots, nothing else.

Legend: B batch, S sequence, N anchors, K slots, H query heads, Hkv key/value heads, d head dimension.

    plan = plan_blocks(anchors, keep, context_start, block_size=K, seq_len=S, ...)       once per batch
    out = block_attention(q, k_ctx, v_ctx, k_blk, v_blk, plan, scale=..., sinks=...)     in every layer

    plan = plan_decode(context_end, context_start, block_size=K, context_len=C, ...)     once per drafting round
    out = decode_attention(q, k_ctx, v_ctx, k_blk, v_blk, plan, scale=..., sinks=...)    in every layer

The rules of visibility and of the two sliding windows are told in :mod:`modelopt_spec.drafter.attention_plan`. Three
implementations give the same result: ``grouped`` (neighbouring blocks share sliced context; any device), ``flex``
(PyTorch flex attention; for GPUs) and ``reference`` (one dense masked softmax).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from modelopt_spec.drafter.attention_flex import flex_block_attention
from modelopt_spec.drafter.attention_grouped import grouped_block_attention
from modelopt_spec.drafter.attention_plan import BlockAttentionPlan, WindowRule, plan_blocks
from modelopt_spec.drafter.attention_reference import block_attention_reference
from modelopt_spec.errors import ConfigError, SpecError

__all__ = [
    "BlockAttentionPlan",
    "Implementation",
    "WindowRule",
    "block_attention",
    "decode_attention",
    "plan_blocks",
    "plan_decode",
]

Implementation = Literal["auto", "grouped", "flex", "reference"]


def block_attention(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    plan: BlockAttentionPlan,
    *,
    scale: float,
    sinks: Tensor | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Attention from the slots of every block to their context and their own block; differentiable.

    Args:
        q: [B, N, K, H, d], rotary embedding applied.
        k_ctx: [B, S, Hkv, d] keys made from the target's features; kv head ``i`` serves the query heads
            ``i * H / Hkv`` to ``(i + 1) * H / Hkv - 1``.
        v_ctx: [B, S, Hkv, d] their values.
        k_blk: [B, N, K, Hkv, d] keys of the slots.
        v_blk: [B, N, K, Hkv, d] their values.
        plan: from :func:`plan_blocks` for the same anchors, shared by all layers.
        scale: factor of the scores before the softmax.
        sinks: [H] learned logit of each head that joins the softmax and has no value; None without sinks.
        implementation: ``"auto"`` takes flex attention on CUDA (but for float64) and the grouped path elsewhere.

    Returns:
        [B, N, K, H, d] in the dtype of ``q``, exactly 0 in padding blocks.

    Raises:
        SpecError: tensors whose shapes, dtypes or plan do not fit together.
        ConfigError: an unknown implementation.
    """
    _check(q, k_ctx, v_ctx, k_blk, v_blk, plan, sinks)
    if implementation not in get_args(Implementation):
        raise ConfigError(f"implementation is {implementation!r}: choose one of {', '.join(get_args(Implementation))}")
    if implementation == "auto":
        implementation = "flex" if q.is_cuda and q.dtype != torch.float64 else "grouped"
    run = {
        "grouped": grouped_block_attention,
        "flex": flex_block_attention,
        "reference": block_attention_reference,
    }[implementation]
    return run(q, k_ctx, v_ctx, k_blk, v_blk, plan, scale=scale, sinks=sinks)


def plan_decode(
    context_end: Tensor,
    context_start: Tensor | None = None,
    keep: Tensor | None = None,
    *,
    block_size: int,
    context_len: int,
    causal: bool = False,
    window: int | None = None,
    window_rule: WindowRule = "block",
) -> BlockAttentionPlan:
    """Plan one drafting round: one block per row that continues the row's cached context.

    Rows of different lengths stand in one cache [B, C, ...] and the entries ``context_start <= p < context_end`` of a
    row are valid; what lies outside is never read. Right padding (the convention of this package: entry p is position
    p) is ``context_end = lengths``; a left-padded cache is ``context_start = C - lengths, context_end = C``. Only
    distances to the anchor matter here, so both give the same result; rotary positions are the caller's business.

    Args:
        context_end: [B] one past the last valid entry of each row: the place of the anchor.
        context_start: [B] first valid entry; None for 0.
        keep: [B] bool, false for rows that draft nothing (their output is 0); None to draft everywhere.
        block_size: K.
        context_len: C, entries of the cache.
        causal: as in :func:`plan_blocks`.
        window: as in :func:`plan_blocks`.
        window_rule: as in :func:`plan_blocks`.
    """
    if context_end.dim() != 1:
        raise SpecError(f"context_end {tuple(context_end.shape)} must be [B], one number per row")
    keep = torch.ones_like(context_end, dtype=torch.bool) if keep is None else keep
    return plan_blocks(
        context_end.unsqueeze(1),
        keep.unsqueeze(1),
        None if context_start is None else context_start.unsqueeze(1),
        block_size=block_size,
        seq_len=context_len,
        causal=causal,
        window=window,
        window_rule=window_rule,
    )


def decode_attention(
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
    """Attention of one block per row to its cached context and itself, while generating.

    Args:
        q: [B, K, H, d].
        k_ctx: [B, C, Hkv, d] cached keys.
        v_ctx: [B, C, Hkv, d] cached values.
        k_blk: [B, K, Hkv, d] keys of the block.
        v_blk: [B, K, Hkv, d] its values.
        plan: from :func:`plan_decode`.
        scale: as in :func:`block_attention`.
        sinks: as in :func:`block_attention`.

    Returns:
        [B, K, H, d].
    """
    if q.dim() != 4 or plan.num_blocks != 1:
        raise SpecError(f"decoding takes q [B, K, H, d] and a plan of plan_decode, got q {tuple(q.shape)}")
    q, k_blk, v_blk = q.unsqueeze(1), k_blk.unsqueeze(1), v_blk.unsqueeze(1)
    _check(q, k_ctx, v_ctx, k_blk, v_blk, plan, sinks)
    # the reference's dense mask is small for one block; row by row would wait for the device
    run = grouped_block_attention if q.device.type == "cpu" else block_attention_reference
    return run(q, k_ctx, v_ctx, k_blk, v_blk, plan, scale=scale, sinks=sinks).squeeze(1)


def _check(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    plan: BlockAttentionPlan,
    sinks: Tensor | None,
) -> None:
    batch, blocks = plan.anchors.shape
    if q.dim() != 5 or k_ctx.dim() != 4:
        raise SpecError(f"q {tuple(q.shape)} must be [B, N, K, H, d] and k_ctx {tuple(k_ctx.shape)} [B, S, Hkv, d]")
    heads, dim = q.shape[3:]
    kv_heads = k_ctx.shape[2]
    expected = {
        "q": (q, (batch, blocks, plan.block_size, heads, dim)),
        "k_ctx": (k_ctx, (batch, plan.seq_len, kv_heads, dim)),
        "v_ctx": (v_ctx, (batch, plan.seq_len, kv_heads, dim)),
        "k_blk": (k_blk, (batch, blocks, plan.block_size, kv_heads, dim)),
        "v_blk": (v_blk, (batch, blocks, plan.block_size, kv_heads, dim)),
    }
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != shape:
            raise SpecError(f"{name} is {tuple(x.shape)}, but the plan and the heads of q and k_ctx ask for {shape}")
        if x.dtype != q.dtype or x.device != q.device:
            raise SpecError(f"{name} is {x.dtype} on {x.device}, but q is {q.dtype} on {q.device}: cast one of them")
    if heads % kv_heads:
        raise SpecError(f"{heads} query heads cannot share {kv_heads} key/value heads: it must divide")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise SpecError(f"sinks is {tuple(sinks.shape)}, but q has {heads} heads: give one logit per head")
