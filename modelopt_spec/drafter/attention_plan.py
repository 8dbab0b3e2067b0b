"""Who may see what in block attention: made once for a batch of anchors, used by every layer.

Legend: B batch, S sequence, N anchors (blocks per row), K slots of a block.

Each of the K slots of a block with anchor ``a`` sees

* context keys at positions ``p`` of its own row with ``context_start <= p < a`` (strictly before the anchor), and
* the slots of its own block (all of them, or the ones up to itself if ``causal``),

and nothing else, however the anchors overlap. A sliding window narrows this by one of two rules:

* ``"block"`` (vLLM, SGLang): every slot sees the last ``window`` context tokens before the anchor and the whole block;
* ``"query"`` (llama.cpp): the slot at position ``p1 = a + k`` does not see a key at ``p0`` with ``p1 - p0 >= window``,
  for each slot on its own and inside the block too.

So the context that a slot sees is one interval ``[first, anchor)``, and what it sees of its block does not depend on
the anchor. Every implementation works from these two facts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from modelopt_spec.errors import ConfigError, SpecError

__all__ = ["BlockAttentionPlan", "WindowRule", "plan_blocks"]

WindowRule = Literal["block", "query"]


@dataclass(frozen=True, eq=False)
class BlockAttentionPlan:
    """The visibility of one batch of blocks; see the module's text for the rules."""

    anchors: Tensor
    """[B, N] int64 anchor positions as given; the value in padding blocks is ignored."""
    keep: Tensor
    """[B, N] bool, false for padding blocks: they see nothing and their output is 0."""
    context_start: Tensor
    """[B, N] int64 first context position that a block may see."""
    block_size: int
    """K."""
    seq_len: int
    """S, the number of context keys of a row."""
    causal: bool
    window: int | None
    window_rule: WindowRule
    order: Tensor | None
    """[B, N] permutation that puts the kept blocks first and in ascending order; None if they stand so already."""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What implementations derive from the plan (tiles, block masks), so that layers share it."""

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.anchors.shape[1]

    def sort(self, x: Tensor) -> Tensor:
        """Blocks in ascending order of their anchors, padding last: [B, N, ...] -> [B, N, ...]."""
        return x if self.order is None else _take_blocks(x, self.order)

    def unsort(self, x: Tensor) -> Tensor:
        """Inverse of :meth:`sort`."""
        return x if self.order is None else _take_blocks(x, self.order.argsort(1))

    def first_visible(self) -> Tensor:
        """First context position that each slot sees, in the order of the anchors as given. [B, N, K] int64.

        Slot k sees ``first_visible <= p < anchor``; the two are equal where it sees no context.
        """
        anchors = self.anchors.unsqueeze(-1)
        first = self.context_start.unsqueeze(-1).expand(-1, -1, self.block_size)
        if self.window is not None:
            lowest = anchors - self.window
            if self.window_rule == "query":
                lowest = lowest + torch.arange(1, self.block_size + 1, device=anchors.device)
            first = torch.maximum(first, lowest)
        return torch.minimum(first, anchors)

    def slots_visible(self) -> Tensor | None:
        """[K, K] bool, whether slot i (query) sees slot j (key) of its block; None if every slot sees all of them."""
        behind = torch.arange(self.block_size, device=self.anchors.device)
        behind = behind.unsqueeze(1) - behind
        hidden = torch.zeros_like(behind, dtype=torch.bool)
        restricted = False
        if self.causal and self.block_size > 1:
            hidden, restricted = behind < 0, True
        if self.window is not None and self.window_rule == "query" and self.window < self.block_size:
            hidden, restricted = hidden | (behind >= self.window), True
        return ~hidden if restricted else None


def plan_blocks(
    anchors: Tensor,
    keep: Tensor,
    context_start: Tensor | None = None,
    *,
    block_size: int,
    seq_len: int,
    causal: bool = False,
    window: int | None = None,
    window_rule: WindowRule = "block",
) -> BlockAttentionPlan:
    """Plan the attention of one batch of blocks. Synchronises with the device once; the layers do not.

    Args:
        anchors: [B, N] anchor positions, ``0 <= a <= S`` (``a = S`` is a block that continues the whole context).
            Ascending along N is fastest; any order, repeats and overlaps are allowed.
        keep: [B, N] bool, false for padding blocks.
        context_start: [B, N] first context position that a block may see; None for 0.
        block_size: K.
        seq_len: S.
        causal: slots see only themselves and the slots before them.
        window: sliding window over the context in tokens, at least 1; None for the whole context.
        window_rule: ``"block"`` or ``"query"``, see the module's text.

    Raises:
        ConfigError: ``block_size``, ``window`` or ``window_rule`` out of range.
        SpecError: tensors of other shapes, or an anchor outside of the row.
    """
    if block_size < 1:
        raise ConfigError(f"block_size is {block_size}: a block needs at least one slot")
    if window is not None and window < 1:
        raise ConfigError(f"window is {window}: give at least 1 token, or null for the whole context")
    if window_rule not in get_args(WindowRule):
        raise ConfigError(f"window_rule is {window_rule!r}: choose one of {', '.join(get_args(WindowRule))}")
    if anchors.dim() != 2 or keep.shape != anchors.shape:
        raise SpecError(f"anchors {tuple(anchors.shape)} and keep {tuple(keep.shape)} must both be [B, N]")
    anchors, keep = anchors.long(), keep.bool()
    if context_start is None:
        context_start = torch.zeros_like(anchors)
    elif context_start.shape != anchors.shape:
        raise SpecError(f"context_start {tuple(context_start.shape)} must be like anchors {tuple(anchors.shape)}")
    context_start = context_start.long().clamp(min=0)

    order = torch.where(keep, anchors, seq_len + 1).argsort(dim=1, stable=True)
    outside = (((anchors < 0) | (anchors > seq_len)) & keep).any()
    unsorted = (order != torch.arange(anchors.shape[1], device=anchors.device)).any()
    is_outside, is_unsorted = torch.stack([outside, unsorted]).tolist()
    if is_outside:
        bad = anchors[((anchors < 0) | (anchors > seq_len)) & keep].tolist()
        raise SpecError(f"anchors {bad[:8]} are outside of 0..{seq_len} (seq_len): clear keep for padding blocks")
    return BlockAttentionPlan(
        anchors=anchors,
        keep=keep,
        context_start=context_start,
        block_size=block_size,
        seq_len=seq_len,
        causal=causal,
        window=window,
        window_rule=window_rule,
        order=order if is_unsorted else None,
    )


def _take_blocks(x: Tensor, order: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x[rows, order]
