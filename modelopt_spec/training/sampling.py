"""The order in which rows are seen: a function of seed and epoch alone, the same after a resume and on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

__all__ = ["EpochSampler"]

WINDOW_GROUPS = 50
"""Optimizer steps whose rows are sorted by length together: enough for little padding, few enough to stay mixed."""
_CHUNK = 65536


class EpochSampler(Sampler[int]):
    """A new permutation of the rows in each epoch, shuffled, or balanced by length.

    With lengths, the rows of one optimizer step (``group`` of them: rows a batch x accumulation x ranks) have similar
    lengths, longest first, so the batches that the ranks work on at the same time do too: little padding, and no rank
    waits for another. Which steps are long is shuffled; the longest comes first, to run out of memory then or never.

    Args:
        num_rows: of the data set.
        seed: of the run.
        lengths: tokens of each row [num_rows]; None shuffles only.
        group: rows of an optimizer step, over all ranks.
    """

    def __init__(self, num_rows: int, seed: int, *, lengths: Tensor | None = None, group: int = 1) -> None:
        self.num_rows, self.seed, self.lengths, self.group = num_rows, seed, lengths, group
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        for part in self.order().split(_CHUNK):
            yield from part.tolist()

    def order(self) -> Tensor:
        """Row indices of the epoch, [num_rows]."""
        digest = hashlib.blake2b(f"{self.seed}|order|{self.epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        order = torch.randperm(self.num_rows, generator=generator)
        return order if self.lengths is None else self._grouped(order, self.lengths, generator)

    def _grouped(self, order: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        windows = order.split(WINDOW_GROUPS * self.group)
        ordered = torch.cat([window[lengths[window].argsort(descending=True, stable=True)] for window in windows])
        full = self.num_rows // self.group
        if full == 0:
            return ordered
        groups = ordered[: full * self.group].view(full, self.group)
        groups = groups[torch.randperm(full, generator=generator)]
        longest = int(lengths[groups[:, 0]].argmax())
        groups = torch.cat([groups[longest : longest + 1], groups[:longest], groups[longest + 1 :]])
        return torch.cat([groups.flatten(), ordered[full * self.group :]])
