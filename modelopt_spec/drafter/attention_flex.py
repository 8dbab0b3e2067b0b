"""Block attention through PyTorch's flex attention: for GPUs, with a block mask that is cached on the plan.

Legend: B batch, S sequence, N anchors, K slots, H query heads, Hkv key/value heads, d head dimension.

Queries are the N * K slots with the anchors ascending, keys the S context positions and then the N * K slots. Sorted
anchors make the mask a staircase, so the lists of key tiles that a query tile has to visit follow from the smallest and
the largest context bound of its rows: no [N*K, S + N*K] mask is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from modelopt_spec.drafter.attention_plan import BlockAttentionPlan

__all__ = ["block_mask", "flex_block_attention"]

TILE = 128
"""Queries and keys of a tile of the block mask (flex attention's default)."""

WITH_LOG_TOTAL: dict[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
)
"""Asks for the logarithm of the softmax denominator: PyTorch 2.9 and later, and 2.8."""


def flex_block_attention(
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
    """Same arguments and result as :func:`modelopt_spec.drafter.attention.block_attention`.

    Compiled on CUDA. Elsewhere it runs eagerly and densely, which is for tests of parity only (PyTorch allows no
    gradients through it on a CPU).
    """
    batch, blocks, slots, heads, dim = q.shape
    queries = plan.sort(q).flatten(1, 2).transpose(1, 2)
    keys, values = (
        torch.cat([context, plan.sort(own).flatten(1, 2)], dim=1).transpose(1, 2)
        for context, own in ((k_ctx, k_blk), (v_ctx, v_blk))
    )
    attend: Any = _compiled() if q.is_cuda else flex_attention
    options = {"block_mask": block_mask(plan), "scale": scale, "enable_gqa": heads != k_ctx.shape[2]}
    if sinks is None:
        out = attend(queries, keys, values, **options)
    else:
        out, aux = attend(queries, keys, values, **options, **WITH_LOG_TOTAL)
        log_total = getattr(aux, "lse", aux)
        out = out * torch.sigmoid(log_total - sinks.view(1, -1, 1)).unsqueeze(-1).to(out.dtype)
    out = plan.unsort(out.transpose(1, 2).reshape(batch, blocks, slots, heads, dim))
    return out.masked_fill(~plan.keep.view(batch, blocks, 1, 1, 1), 0.0)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def block_mask(plan: BlockAttentionPlan) -> BlockMask:
    """The plan as a block mask for queries [N * K] and keys [S + N * K], made once per plan without synchronising.

    Padding blocks see their own slots here, so that no row of the softmax is empty; their output is dropped after it.
    """
    if "flex" not in plan.cache:
        plan.cache["flex"] = _make_block_mask(plan)
    return plan.cache["flex"]


def _make_block_mask(plan: BlockAttentionPlan) -> BlockMask:
    slots, seq_len = plan.block_size, plan.seq_len
    queries = plan.num_blocks * slots
    keys = seq_len + queries
    keep = plan.sort(plan.keep).unsqueeze(-1)
    stop = torch.where(keep, plan.sort(plan.anchors).unsqueeze(-1), 0).expand(-1, -1, slots).flatten(1).contiguous()
    first = torch.where(keep, plan.sort(plan.first_visible()), 0).flatten(1)
    visible = plan.slots_visible()

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = key - seq_len
        same_block = (own >= 0) & (own // slots == query // slots)
        if visible is not None:
            same_block = same_block & visible[query % slots, own % slots]
        return same_block | ((key >= first[b, query]) & (key < stop[b, query]))

    # bounds of the context that the rows of each query tile see; rows that see none do not widen it
    sees = first < stop
    lowest = _tiles(torch.where(sees, first, keys), keys).amin(-1, keepdim=True)
    highest = _tiles(torch.where(sees, stop, 0), 0).amax(-1, keepdim=True)
    # and the context that all of them see
    common_lo = _tiles(torch.where(sees, first, keys), 0).amax(-1, keepdim=True)
    common_hi = _tiles(torch.where(sees, stop, 0), keys).amin(-1, keepdim=True)

    tile_lo = torch.arange(0, keys, TILE, device=stop.device)
    tile_hi = (tile_lo + TILE).clamp(max=keys)
    row_lo = torch.arange(0, queries, TILE, device=stop.device).unsqueeze(-1)
    row_hi = (row_lo + TILE).clamp(max=queries)
    own_lo = seq_len + row_lo // slots * slots
    own_hi = seq_len + -(-row_hi // slots) * slots
    listed = ((lowest < tile_hi) & (highest > tile_lo)) | ((own_lo < tile_hi) & (own_hi > tile_lo))
    full = (common_lo <= tile_lo) & (common_hi >= tile_hi)
    partial_count, partial_index = _tile_list(listed & ~full)
    full_count, full_index = _tile_list(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )


def _tiles(x: Tensor, fill: int) -> Tensor:
    """[B, N * K] -> [B, tiles, TILE], the last tile filled up."""
    missing = -x.shape[1] % TILE
    return torch.nn.functional.pad(x, (0, missing), value=fill).unflatten(1, (-1, TILE))


def _tile_list(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """[B, query tiles, key tiles] bool -> how many, and their indices first: int32 [B, 1, query tiles(, key tiles)]."""
    index = (~wanted).to(torch.int8).argsort(dim=-1, stable=True)
    return wanted.sum(-1, dtype=torch.int32).unsqueeze(1), index.to(torch.int32).unsqueeze(1)
