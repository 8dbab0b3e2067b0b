"""Cuts the rows of a loss into chunks and says which target positions each chunk computes or takes over.

Rows come block after block with ascending anchors, so the target positions of neighbouring chunks overlap by less than
a block. A chunk keeps the distributions that the chunk before it left and computes only the new ones: over the whole
call each distinct position is projected once. (Rows in any other order are handled too; a position that returns after
a chunk without it is then projected again.)

Legend: M rows, P distinct positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Chunk", "Tiling", "default_tiling", "plan_chunks"]

_MIB = 2**20


@dataclass(frozen=True)
class Tiling:
    """Sizes of the pieces that the loss works on."""

    chunk_rows: int
    """Rows of length V that are held at once: draft rows, target rows and, for base logits, their copy."""
    columns: int
    """Vocabulary rows of W that one matrix product takes: W's tile is packed in cache instead of in memory."""
    cells: int
    """Logits that the elementwise passes handle at once: what stays in a core's cache between passes."""


def default_tiling(vocab_size: int, dtype: torch.dtype, device: torch.device, copies: int = 1) -> Tiling:
    """Sizes that cost little over the bare matrix products.

    A product of m rows with W [V, D] reads all of W, so few rows waste bandwidth: on a CPU more than 56 MiB bring
    little at V = 32000, but fewer than 240 rows (two chunks for 32 blocks of 8 slots with their targets) cost 4% to 10%
    at any V. ``copies`` 2 (base logits beside corrected ones) takes a third more. An accelerator wants large products
    and few kernels.
    """
    row_bytes = vocab_size * dtype.itemsize
    if device.type != "cpu":
        rows = min(max(512 * _MIB // row_bytes, 512), 16384)
        return Tiling(chunk_rows=rows * copies, columns=vocab_size, cells=max(vocab_size, 2**26))
    rows = min(max(56 * _MIB // row_bytes, 240), 1024)
    threads = torch.get_num_threads()
    columns = 1024 * threads if dtype.itemsize >= 4 else vocab_size
    return Tiling(chunk_rows=rows * (2 + copies) // 3, columns=columns, cells=2**18 * threads)


@dataclass(frozen=True)
class Chunk:
    """Rows of one chunk and the target buffer that they read, which holds the kept positions first, then the new."""

    rows: slice
    kept: Tensor
    """[k] int64, ascending: rows of the previous chunk's buffer that move to the front."""
    new: Tensor
    """[n] int64: positions to project, ascending."""
    index: Tensor
    """[m] int64: row of the buffer for each row of the chunk."""

    @property
    def num_rows(self) -> int:
        """Rows in this chunk."""
        return self.rows.stop - self.rows.start

    @property
    def num_positions(self) -> int:
        """Rows of the target buffer in use."""
        return len(self.kept) + len(self.new)


def plan_chunks(blocks: Tensor, target_index: Tensor | None, chunk_rows: int, copies: int = 1) -> list[Chunk]:
    """Cut rows at block boundaries into chunks of about equal size.

    Args:
        blocks: [M] block of each row, equal values together.
        target_index: [M] position of each row; None if the target is not read.
        chunk_rows: draft rows times ``copies`` plus target rows that a chunk may hold on average; one block at least.
        copies: buffers of draft rows.

    Returns:
        The chunks in order; none for M = 0. Their tensors stand on the device of ``blocks``.
    """
    total = len(blocks)
    if total == 0:
        return []
    ids = blocks.cpu().numpy()
    positions = None if target_index is None else target_index.cpu().numpy()
    distinct = 0 if positions is None else len(np.unique(positions))
    count = max(1, -(-(total * copies + distinct) // chunk_rows))
    starts = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])
    wanted = np.arange(1, count) * total / count
    cuts = np.unique(starts[np.clip(np.searchsorted(starts, wanted), 0, len(starts) - 1)]) if count > 1 else starts[:1]
    bounds = np.unique(np.concatenate([[0], cuts, [total]]))
    chunks = []
    held = np.empty(0, dtype=np.int64)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if positions is None:
            kept = new = index = np.empty(0, dtype=np.int64)
        else:
            need = np.unique(positions[start:stop])
            kept = np.flatnonzero(np.isin(held, need))
            new = np.setdiff1d(need, held, assume_unique=True)
            held = np.concatenate([held[kept], new])
            order = np.argsort(held)
            index = order[np.searchsorted(held, positions[start:stop], sorter=order)]
        tensors = [torch.from_numpy(part.astype(np.int64)).to(blocks.device) for part in (kept, new, index)]
        chunks.append(Chunk(slice(start, stop), *tensors))
    return chunks
