"""Rows of a data set that know their number, and batches that know their rows.

Legend: B batch, S sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelopt_spec.data.collate import collate_rows

__all__ = ["Collator", "IndexedRows"]


class IndexedRows(torch.utils.data.Dataset):
    """A data set whose rows know their index, so that a bad one can be named and features can be kept."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "row": index}

    def lengths(self) -> Tensor:
        """Tokens of each row, [rows] int64."""
        if "length" in getattr(self.rows, "column_names", ()):
            return torch.as_tensor(self.rows.select_columns(["length"])[:]["length"]).long()
        return torch.tensor([len(row["input_ids"]) for row in self.rows])


class Collator:
    """Rows of :class:`IndexedRows` -> a batch with ``lengths`` and ``rows`` beside the tensors."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate."""
        batch: dict[str, Any] = collate_rows(rows, self.pad_token_id)
        batch["lengths"] = [len(row["input_ids"]) for row in rows]
        batch["rows"] = [int(row["row"]) for row in rows]
        return batch
