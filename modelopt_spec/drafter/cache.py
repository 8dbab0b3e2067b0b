"""Cache of projected context: keys and values of committed positions, each projected once.

Legend: B batch, C capacity, G kv heads, d head width, n new positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ContextCache"]


class ContextCache:
    """Keys and values [B, C, G, d] of every layer; row b holds ``lengths[b]`` positions, left-aligned."""

    def __init__(self, num_layers: int, batch_size: int, device: torch.device) -> None:
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.longest = 0

    def new_positions(self, n: int) -> Tensor:
        """Positions [B, n] that the next n entries take."""
        return self.lengths.unsqueeze(1) + torch.arange(n, device=self.lengths.device)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write [B, n, G, d] behind each row's length. Call :meth:`advance` once all layers are written."""
        n = keys.shape[1]
        for store, new in ((self.keys, keys), (self.values, values)):
            store[layer] = buffer = _with_room(store[layer], new, self.longest + n)
            if buffer.shape[0] == 1:
                buffer[:, self.longest : self.longest + n] = new
            else:
                rows = torch.arange(buffer.shape[0], device=buffer.device).unsqueeze(1)
                buffer[rows, self.new_positions(n)] = new

    def advance(self, counts: Tensor) -> None:
        """Count the first ``counts[b]`` of the entries just written as context; later writes replace the others."""
        self.lengths = self.lengths + counts
        self.longest = int(self.lengths.max())

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, longest, G, d]; entries at or behind ``lengths[b]`` are not context."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None and values is not None
        return keys[:, : self.longest], values[:, : self.longest]

    def select(self, rows: Tensor) -> None:
        """Keep these rows only, in this order."""
        self.lengths = self.lengths[rows]
        self.longest = int(self.lengths.max()) if len(rows) else 0
        self.keys = [None if k is None else k[rows] for k in self.keys]
        self.values = [None if v is None else v[rows] for v in self.values]


def _with_room(buffer: Tensor | None, new: Tensor, needed: int) -> Tensor:
    """A buffer of at least ``needed`` positions that keeps what is stored; grows by doubling."""
    if buffer is not None and buffer.shape[1] >= needed:
        return buffer
    capacity = max(needed, 256 if buffer is None else 2 * buffer.shape[1])
    grown = new.new_zeros((new.shape[0], capacity, *new.shape[2:]))
    if buffer is not None:
        grown[:, : buffer.shape[1]] = buffer
    return grown
