"""The one place that knows which slot predicts which token, which layer a tap id means and what a block may be taught.

Legend: B batch, S sequence, N anchors (blocks per row), K slots of a block, T taps, L target layers.

A block starts at its *anchor*, the last committed token, at position ``a``. Its K slots embed
``[x_a, MASK, ..., MASK]`` at positions ``a .. a+K-1`` and see the target's features of positions ``< a``.

* ``anchor_first`` (DSpark, Domino, DeepSpec's DFlash): slot k predicts the token at ``a + k + 1``.
* ``bonus_anchor`` (z-lab DFlash, speculators' ``sample_from_anchor=false``): slot k predicts the token at ``a + k``;
  slot 0 holds the known anchor and predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_spec.errors import ConfigError
from modelopt_spec.layout import BlockLayout

__all__ = [
    "EMBEDDING_TAP",
    "BlockLayout",
    "aux_layer_id",
    "block_positions",
    "check_target_layer_ids",
    "default_target_layer_ids",
    "first_drafting_slot",
    "hidden_states_index",
    "label_offset",
    "label_positions",
    "num_draft_tokens",
    "previous_positions",
    "slot_decay",
    "supervision_mask",
    "tap_from_aux_layer_id",
]

EMBEDDING_TAP = -1
"""The tap id of the embedding output."""


# ---- slots and tokens ------------------------------------------------------------------------------------------------


def label_offset(layout: BlockLayout) -> int:
    """Slot k predicts the token at position ``anchor + k + label_offset``."""
    return 1 if layout == BlockLayout.ANCHOR_FIRST else 0


def first_drafting_slot(layout: BlockLayout) -> int:
    """Index of the first slot whose prediction is a new token: 0, or 1 where slot 0 holds the known anchor."""
    return 0 if layout == BlockLayout.ANCHOR_FIRST else 1


def num_draft_tokens(layout: BlockLayout, block_size: int, *, drops_last_slot: bool = False) -> int:
    """Tokens that one block of ``block_size`` slots drafts.

    ``drops_last_slot`` is Domino's reference decoder, which trains slot K-1 of an anchor-first block but never uses it
    (SpecForge 0.2 and SGLang draft K-1 tokens in both layouts).
    """
    drafts = block_size - first_drafting_slot(layout)
    return drafts - 1 if drops_last_slot and layout == BlockLayout.ANCHOR_FIRST else drafts


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Positions that the slots stand at: anchors [...] -> [..., K], ``a .. a+K-1``."""
    return anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)


def label_positions(anchors: Tensor, block_size: int, layout: BlockLayout) -> Tensor:
    """Positions of the tokens that the slots predict: anchors [...] -> [..., K]. May run past the sequence."""
    return block_positions(anchors, block_size) + label_offset(layout)


def previous_positions(anchors: Tensor, block_size: int, layout: BlockLayout) -> Tensor:
    """Positions of the token before each predicted one (the head's input): [...] -> [..., K].

    Slot 0 of a bonus-anchor block predicts nothing; its entry is the anchor itself.
    """
    positions = label_positions(anchors, block_size, layout) - 1
    return torch.maximum(positions, anchors.unsqueeze(-1))


def supervision_mask(
    loss_mask: Tensor,
    anchors: Tensor,
    keep: Tensor,
    *,
    block_size: int,
    layout: BlockLayout,
    stop_at_gap: bool,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Which slots are taught.

    Args:
        loss_mask: [B, S], true where the token is supervised.
        anchors: [B, N] anchor positions. keep: [B, N], false for padding blocks.
        stop_at_gap: DSpark's rule: a slot is taught only while every label before it in the block is supervised too.
            Domino and bonus-anchor DFlash go on after a gap.
        segment_ids: [B, S] conversation index of each token of a packed row; labels of another conversation than the
            anchor's are never taught.

    Returns:
        bool [B, N, K].
    """
    length = loss_mask.shape[1]
    positions = label_positions(anchors, block_size, layout)
    inside = positions < length
    index = positions.clamp(max=length - 1).flatten(1)
    taught = inside & loss_mask.bool().gather(1, index).view_as(positions) & keep.unsqueeze(-1)
    if segment_ids is not None:
        segments = segment_ids.gather(1, index).view_as(positions)
        taught &= segments == segment_ids.gather(1, anchors).unsqueeze(-1)
    first = first_drafting_slot(layout)
    taught[..., :first] = False
    if stop_at_gap:
        taught[..., first:] = taught[..., first:].cumprod(-1).bool()
    return taught


def slot_decay(block_size: int, decay: float | None, layout: BlockLayout, device: torch.device | None = None) -> Tensor:
    """Weight ``exp(-j / decay)`` of each slot, j counted from the first drafting slot; else ones. [K] float64."""
    slots = torch.arange(block_size, device=device, dtype=torch.float64)
    if decay is None:
        return torch.ones_like(slots)
    if decay <= 0:
        raise ConfigError(f"decay is {decay}: it must be positive (slots), or null for equal weights")
    return torch.exp(-(slots - first_drafting_slot(layout)).clamp(min=0) / decay)


# ---- taps ------------------------------------------------------------------------------------------------------------


def hidden_states_index(layer_id: int) -> int:
    """Index into Hugging Face ``hidden_states`` of a tap: ids are 0-based layer outputs, -1 is the embedding output."""
    return layer_id + 1


def aux_layer_id(layer_id: int) -> int:
    """VLLM's and speculators' "aux" id, and llama.cpp's ``target_layers``, of a tap."""
    return layer_id + 1


def tap_from_aux_layer_id(aux_id: int) -> int:
    """Inverse of :func:`aux_layer_id`."""
    return aux_id - 1


def default_target_layer_ids(num_target_layers: int, num_taps: int | None = None) -> tuple[int, ...]:
    """Taps spread evenly from layer 1 to layer L-3, as the reference releases do.

    Without ``num_taps``: five, or as many as a shallow target has room for. Targets of fewer than four layers have
    no such range; their middle layer is tapped.
    """
    first, last = 1, num_target_layers - 3
    if last < first:
        if num_taps not in (None, 1):
            raise ConfigError(
                f"num_taps is {num_taps}, but a target of {num_target_layers} layers has room for one tap: "
                "set num_taps to 1 or name target_layer_ids"
            )
        return (max(0, (num_target_layers - 1) // 2),)
    room = last - first + 1
    count = min(5, room) if num_taps is None else num_taps
    if not 1 <= count <= room:
        raise ConfigError(
            f"num_taps is {num_taps}, but a target of {num_target_layers} layers has room for 1 to {room} taps "
            f"(layers {first} to {last})"
        )
    if count == 1:
        return ((first + last) // 2,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def check_target_layer_ids(layer_ids: Sequence[int], num_target_layers: int) -> tuple[int, ...]:
    """Validate tap ids: at least one, sorted, distinct, between -1 (embedding) and L-1."""
    ids = tuple(int(i) for i in layer_ids)
    if not ids:
        raise ConfigError("target_layer_ids is empty: name at least one layer, or leave it unset for the default")
    outside = [i for i in ids if not EMBEDDING_TAP <= i < num_target_layers]
    if outside:
        raise ConfigError(
            f"target_layer_ids {list(ids)}: {outside} are outside of this target's layers "
            f"0..{num_target_layers - 1} (ids are 0-based layer outputs, -1 is the embedding output)"
        )
    if list(ids) != sorted(set(ids)):
        raise ConfigError(f"target_layer_ids {list(ids)} must be strictly increasing; use {sorted(set(ids))}")
    return ids
