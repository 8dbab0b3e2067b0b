"""The three records that travel between the rooms.

Legend: B batch, S sequence, N anchors, K slots, D hidden, R head rank, T taps.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["BlockBatch", "BlockOutput", "TargetFeatures"]


@dataclass(frozen=True)
class TargetFeatures:
    """What the target gives to a drafter for one batch of token rows."""

    taps: Tensor
    """[B, S, T*D] outputs of the tapped layers, concatenated in order of layer id."""
    last_hidden: Tensor | None = None
    """[B, S, D] after the target's final norm: the input of its output projection."""


@dataclass(frozen=True)
class BlockBatch:
    """N blocks of K slots for each row of a batch; anchors ascend along N, padding blocks stand last."""

    anchors: Tensor
    """[B, N] position of each anchor; 0 in padding blocks."""
    keep: Tensor
    """[B, N] bool, false for padding blocks."""
    input_ids: Tensor
    """[B, N, K] the anchor's token, then mask tokens: what the slots embed."""
    prev_ids: Tensor
    """[B, N, K] true token before the predicted one: the correction head's input while training."""
    label_ids: Tensor
    """[B, N, K] token that the slot predicts (any id where it is not supervised)."""
    supervised: Tensor
    """[B, N, K] bool, which slots are taught."""
    weights: Tensor
    """[B, N, K] float64, loss weight of each slot (0 where not supervised)."""
    target_positions: Tensor
    """[B, N, K] position whose last hidden state predicts the label: label position - 1, clamped into the row."""
    position_ids: Tensor
    """[B, N, K] rotary position of each slot."""
    context_start: Tensor
    """[B, N] first context position that the block may see (0, or where its conversation starts in a packed row)."""


@dataclass(frozen=True)
class BlockOutput:
    """What a draft pass returns; logits are made from it only where somebody needs them."""

    hidden: Tensor
    """[B, N, K, D] after the drafter's final norm."""
    latents: Tensor | None = None
    """[B, N, K, R] the correction head's u, zero for slots that keep base logits; None without a head."""
    confidence: Tensor | None = None
    """[B, N, K] confidence logits; None without a confidence head."""
