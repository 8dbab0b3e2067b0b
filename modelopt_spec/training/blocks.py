"""Choose anchors and lay out the blocks that a drafter is taught on.

Legend: B batch, S sequence, N anchors (blocks per row), K slots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_spec.conventions import (
    BlockLayout,
    block_positions,
    label_positions,
    previous_positions,
    slot_decay,
    supervision_mask,
)
from modelopt_spec.records import BlockBatch

__all__ = ["BlockSettings", "anchor_generator", "make_blocks", "row_generators", "sample_anchors", "valid_anchors"]

AnchorGenerator = torch.Generator | Sequence[torch.Generator] | None
"""One generator for a batch, or one for each of its rows."""


@dataclass(frozen=True)
class BlockSettings:
    """How blocks are cut from token rows."""

    block_size: int
    layout: BlockLayout
    mask_token_id: int
    num_anchors: int
    decay: float | None
    stop_at_gap: bool


def valid_anchors(loss_mask: Tensor, segment_ids: Tensor | None = None) -> Tensor:
    """Positions that may start a block: they and their next token are supervised, in the same conversation. [B, S]."""
    mask = loss_mask.bool()
    valid = torch.zeros_like(mask)
    valid[:, :-1] = mask[:, :-1] & mask[:, 1:]
    if segment_ids is not None:
        valid[:, :-1] &= segment_ids[:, :-1] == segment_ids[:, 1:]
    return valid


def sample_anchors(valid: Tensor, num_anchors: int, generator: AnchorGenerator = None) -> tuple[Tensor, Tensor]:
    """Draw up to ``num_anchors`` of each row's valid positions without replacement.

    Args:
        valid: bool [B, S].
        num_anchors: blocks of a row, at most.
        generator: on the CPU, so that a run is the same on every device. With one for each row (:func:`row_generators`)
            a row's anchors depend on neither its batch nor the padding.

    Returns:
        anchors [B, N] ascending, padding blocks (position 0) last; keep [B, N]. N is the
        largest count of the batch, at least 1.
    """
    length = valid.shape[1]
    scores = torch.where(valid, _scores(valid, generator), -1.0)
    count = max(1, min(num_anchors, int(valid.sum(1).max())))
    best, positions = scores.topk(count, dim=1)
    keep = best >= 0
    positions = torch.where(keep, positions, length).sort(dim=1).values
    keep = positions < length
    return torch.where(keep, positions, 0), keep


def _scores(valid: Tensor, generator: AnchorGenerator) -> Tensor:
    """Uniform numbers [B, S]; rows with generators of their own draw one for each valid position."""
    if generator is None or isinstance(generator, torch.Generator):
        return torch.rand(valid.shape, generator=generator).to(valid.device)
    scores, mask = torch.zeros(valid.shape), valid.cpu()
    for row, own in enumerate(generator):
        scores[row, mask[row]] = torch.rand(int(mask[row].sum()), generator=own)
    return scores.to(valid.device)


def make_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    keep: Tensor,
    settings: BlockSettings,
    *,
    position_ids: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> BlockBatch:
    """The blocks at given anchors.

    Args:
        input_ids: [B, S]. loss_mask: [B, S] bool. anchors, keep: [B, N] as of :func:`sample_anchors`.
        position_ids: [B, S] rotary positions; needed where packed rows restart them.
        segment_ids: [B, S] conversation of each token of a packed row.
    """
    size, layout, length = settings.block_size, settings.layout, input_ids.shape[1]

    def tokens_at(positions: Tensor) -> Tensor:
        return input_ids.gather(1, positions.clamp(max=length - 1).flatten(1)).view_as(positions)

    labels = label_positions(anchors, size, layout)
    supervised = supervision_mask(
        loss_mask,
        anchors,
        keep,
        block_size=size,
        layout=layout,
        stop_at_gap=settings.stop_at_gap,
        segment_ids=segment_ids,
    )
    slots = torch.full((*anchors.shape, size), settings.mask_token_id, dtype=torch.long, device=input_ids.device)
    slots[..., 0] = torch.where(keep, input_ids.gather(1, anchors), settings.mask_token_id)
    if position_ids is None:
        positions, context_start = block_positions(anchors, size), torch.zeros_like(anchors)
    else:
        positions = block_positions(position_ids.gather(1, anchors), size)
        context_start = (
            anchors - position_ids.gather(1, anchors) if segment_ids is not None else torch.zeros_like(anchors)
        )
    return BlockBatch(
        anchors=anchors,
        keep=keep,
        input_ids=slots,
        prev_ids=tokens_at(previous_positions(anchors, size, layout)),
        label_ids=tokens_at(labels),
        supervised=supervised,
        weights=supervised * slot_decay(size, settings.decay, layout, input_ids.device),
        target_positions=(labels - 1).clamp(0, length - 1),
        position_ids=positions,
        context_start=context_start,
    )


def anchor_generator(seed: int, place: int) -> torch.Generator:
    """A CPU generator that depends on the run's seed and a place in it."""
    return torch.Generator().manual_seed((seed * 1_000_003 + place) % (2**63))


def row_generators(seed: int, step: int | str, rows: Sequence[int]) -> list[torch.Generator]:
    """A CPU generator for each row of a batch, from the seed, the step and the row's index in the data set alone.

    Whoever cuts the same rows at the same step into other micro-batches, or spreads them over other ranks, draws the
    same anchors. Evaluation names itself instead of a step.
    """
    names = (f"{seed}|{step}|{row}".encode() for row in rows)
    digests = (hashlib.blake2b(name, digest_size=8).digest() for name in names)
    return [torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1) for digest in digests]
