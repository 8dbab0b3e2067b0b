"""Where the target's features of a training batch come from: computed now, or kept from an earlier epoch.

Legend: B batch, S sequence, D hidden, T taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from modelopt_spec.data.cache_format import row_key
from modelopt_spec.records import TargetFeatures
from modelopt_spec.targets.base import Target

__all__ = ["FeatureSource", "MemoryFeatures", "OnlineFeatures"]


class FeatureSource(Protocol):
    """Gives the features of a batch."""

    def features(
        self, input_ids: Tensor, lengths: Sequence[int], rows: Sequence[int], position_ids: Tensor | None
    ) -> TargetFeatures:
        """Features of right-padded [B, S] ids.

        Args:
            lengths: tokens of each row without its padding. rows: index of each row in the data set.
            position_ids: [B, S], only where packed rows restart them.
        """
        ...


class OnlineFeatures:
    """Run the target. Rows are padded on the right and attention is causal, so padding needs no mask."""

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        self.target = target
        self.layer_ids = tuple(layer_ids)

    def features(
        self, input_ids: Tensor, lengths: Sequence[int], rows: Sequence[int], position_ids: Tensor | None
    ) -> TargetFeatures:
        """Features computed by the target, outside of any autocast."""
        with torch.autocast(input_ids.device.type, enabled=False):
            return self.target.features(input_ids, self.layer_ids, position_ids=position_ids)


class MemoryFeatures:
    """Keep the features of every row that was seen, on the CPU and in the target's dtype, for the next epochs.

    Rows are known by their tokens, not by their number: training and validation rows with the same number differ.
    """

    def __init__(self, source: OnlineFeatures) -> None:
        self.source = source
        self._kept: dict[bytes, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of features in memory."""
        return sum(taps.nbytes + last.nbytes for taps, last in self._kept.values())

    def features(
        self, input_ids: Tensor, lengths: Sequence[int], rows: Sequence[int], position_ids: Tensor | None
    ) -> TargetFeatures:
        """Features of the batch; only rows that were never seen go through the target."""
        ids = input_ids.cpu().numpy()
        places = None if position_ids is None else position_ids.cpu().numpy()
        keys = [row_key(ids[i, :n], None if places is None else places[i, :n]) for i, n in enumerate(lengths)]
        missing = [i for i, key in enumerate(keys) if key not in self._kept]
        if missing:
            longest = max(lengths[i] for i in missing)
            subset = None if position_ids is None else position_ids[missing, :longest]
            new = self.source.features(
                input_ids[missing, :longest], [lengths[i] for i in missing], [rows[i] for i in missing], subset
            )
            assert new.last_hidden is not None
            for place, i in enumerate(missing):
                n = lengths[i]
                self._kept[keys[i]] = (new.taps[place, :n].cpu().clone(), new.last_hidden[place, :n].cpu().clone())
        size, device = input_ids.shape[1], input_ids.device
        kept = [self._kept[key] for key in keys]
        return TargetFeatures(
            taps=_stack([taps for taps, _ in kept], size, device),
            last_hidden=_stack([last for _, last in kept], size, device),
        )


def _stack(parts: list[Tensor], size: int, device: torch.device) -> Tensor:
    """Right-pad [s_i, X] tensors with zeros to [B, S, X]."""
    stacked = parts[0].new_zeros((len(parts), size, parts[0].shape[-1]))
    for row, part in enumerate(parts):
        stacked[row, : part.shape[0]] = part
    return stacked.to(device)
