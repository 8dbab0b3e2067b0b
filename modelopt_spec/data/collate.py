"""Token rows -> one right-padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.data.chat import TokenRow
from modelopt_spec.errors import DataError

__all__ = ["collate_rows"]


def collate_rows(
    rows: Sequence[Mapping[str, Any] | TokenRow],
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> dict[str, Tensor | None]:
    """Pad rows on the right to the longest.

    Args:
        rows: each with input_ids and loss_mask of its length, and segment_ids where several conversations share a row.
        pad_token_id: fills input_ids; padding is never attended to and never supervised, so any id does.
        pad_to_multiple_of: round the length up.

    Returns:
        input_ids [B, S] int64, attention_mask [B, S] int64, loss_mask [B, S] bool, position_ids [B, S] int64
        (restarting in each conversation, 0 in padding)
        and segment_ids [B, S] int64 (-1 in padding), or None when no row is packed.

    Raises:
        DataError: no rows, an empty row, or columns of different lengths (the message names the row).
    """
    if not rows:
        raise DataError("collate_rows got no rows: a batch needs at least one")
    columns = [_columns(index, row) for index, row in enumerate(rows)]
    size = max(len(ids) for ids, _, _ in columns)
    if pad_to_multiple_of:
        size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
    shape = (len(rows), size)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    position_ids = torch.zeros(shape, dtype=torch.long)
    packed = any(segments is not None for _, _, segments in columns)
    segment_ids = torch.full(shape, -1, dtype=torch.long) if packed else None
    for index, (ids, mask, segments) in enumerate(columns):
        length = len(ids)
        input_ids[index, :length] = ids
        attention_mask[index, :length] = 1
        loss_mask[index, :length] = mask
        if segment_ids is None:
            position_ids[index, :length] = torch.arange(length)
        else:
            row_segments = torch.zeros(length, dtype=torch.long) if segments is None else segments
            segment_ids[index, :length] = row_segments
            position_ids[index, :length] = restart_positions(row_segments)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
        "segment_ids": segment_ids,
    }


def restart_positions(segment_ids: Tensor) -> Tensor:
    """Positions that start at 0 with every conversation: segment_ids [S] (ascending) -> [S]."""
    _, counts = torch.unique_consecutive(segment_ids, return_counts=True)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.arange(len(segment_ids)) - starts


def _columns(index: int, row: Mapping[str, Any] | TokenRow) -> tuple[Tensor, Tensor, Tensor | None]:
    values = vars(row) if isinstance(row, TokenRow) else row
    ids = torch.as_tensor(values["input_ids"], dtype=torch.long)
    mask = torch.as_tensor(values["loss_mask"], dtype=torch.bool)
    segments = values.get("segment_ids")
    segments = None if segments is None else torch.as_tensor(segments, dtype=torch.long)
    lengths = {len(ids), len(mask), len(ids) if segments is None else len(segments)}
    if len(lengths) != 1 or not len(ids):
        raise DataError(
            f"row {index} of the batch: input_ids, loss_mask and segment_ids have lengths {sorted(lengths)}"
        )
    return ids, mask, segments
