"""Target features from disk, behind the same interface as features that the target computes while training.

Legend: B batch, S sequence, T taps, D hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from modelopt_spec.data.cache_format import (
    DTYPES,
    check_identity,
    dequantize,
    finished_record,
    read_index,
    row_key,
)
from modelopt_spec.errors import DataError
from modelopt_spec.records import TargetFeatures

__all__ = ["CachedFeatures"]

OPEN_SHARDS = 64
"""Shards that are mapped at a time."""


class _Source(Protocol):
    def features(
        self, input_ids: Tensor, lengths: Sequence[int], rows: Sequence[int], position_ids: Tensor | None
    ) -> TargetFeatures: ...


class CachedFeatures:
    """Reads what :func:`modelopt_spec.data.feature_cache.write_cache` wrote.

    Rows are found by their tokens, not by their number: a shuffled, subsampled or second data set gets the right
    features or an error.

    Args:
        path: the cache.
        layer_ids: taps of the drafter; they must be the cache's.
        identity: fingerprints to check (``target``, ``data``, ``tokenizer``, ``template``). A cache that holds needed
            positions only must be checked against ``data``: with another supervision other positions are needed.
        fallback: computes rows that the cache lacks; without it they are an error.
        verify: read every shard and compare its checksum first.

    Raises:
        DataError: missing, unfinished or damaged shards, or a cache made of something else.
    """

    def __init__(
        self,
        path: str | Path,
        layer_ids: Sequence[int],
        identity: Mapping[str, str],
        *,
        fallback: _Source | None = None,
        verify: bool = False,
    ) -> None:
        self.path = Path(path).expanduser()
        self.index = read_index(self.path)
        self.fallback = fallback
        if tuple(layer_ids) != self.index.layer_ids:
            raise DataError(
                f"feature cache {str(self.path)!r} holds taps {list(self.index.layer_ids)}, the drafter reads "
                f"{list(layer_ids)}: write it again or set drafter.target_layer_ids"
            )
        if self.index.positions == "needed" and "data" not in identity:
            raise DataError(
                f"feature cache {str(self.path)!r} holds needed positions only: pass the fingerprint of the data, or "
                "write it with positions 'all'"
            )
        check_identity(self.index, identity, self.path)
        bad = [s.file for s in self.index.shards if finished_record(self.path, s, verify) is None]
        if bad:
            raise DataError(
                f"feature cache {str(self.path)!r}: {len(bad)} of {len(self.index.shards)} shards are missing, cut "
                f"short or damaged ({', '.join(bad[:5])}): run the same cache command again to write them"
            )
        self.dtype = DTYPES[self.index.source_dtype]
        self._handles: OrderedDict[int, Any] = OrderedDict()
        self._load_tables()

    def __len__(self) -> int:
        return self.index.rows

    def __getitem__(self, row: int) -> TargetFeatures:
        """Features of one row of the data set that was cached: taps [S, T*D], last_hidden [S, D]."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a feature cache of {len(self)} rows")
        length = int(self._rows[row, 0])
        width = self.index.hidden_size
        taps = torch.zeros((length, width * len(self.index.layer_ids)), dtype=self.dtype)
        last = torch.zeros((length, width), dtype=self.dtype)
        self._read(row, taps, last)
        return TargetFeatures(taps=taps, last_hidden=last)

    def features(
        self, input_ids: Tensor, lengths: Sequence[int], rows: Sequence[int], position_ids: Tensor | None
    ) -> TargetFeatures:
        """Features of right-padded [B, S] ids; positions that are not stored, and padding, are zeros.

        Args:
            input_ids: [B, S] token ids.
            lengths: tokens of each row without its padding.
            rows: index of each row in the data set; where it names other tokens the row is searched for.
            position_ids: [B, S] where packed rows restart them, else None.

        Raises:
            DataError: a row is not in the cache and there is no fallback.
        """
        ids = input_ids.cpu().numpy()
        positions = None if position_ids is None else position_ids.cpu().numpy()
        places = []
        for b, length in enumerate(lengths):
            key = row_key(ids[b, :length], None if positions is None else positions[b, :length])
            places.append(self._find(key, rows[b]))
        if any(place is None for place in places):
            if self.fallback is not None:
                return self.fallback.features(input_ids, lengths, rows, position_ids)
            lost = next(rows[b] for b, place in enumerate(places) if place is None)
            raise DataError(
                f"row {lost} of the data set is not in feature cache {str(self.path)!r}: it has other tokens"
            )
        width = self.index.hidden_size
        shape = input_ids.shape
        taps = torch.zeros((*shape, width * len(self.index.layer_ids)), dtype=self.dtype)
        last = torch.zeros((*shape, width), dtype=self.dtype)
        for b, place in enumerate(places):
            assert place is not None
            self._read(place, taps[b], last[b])
        return TargetFeatures(taps=taps.to(input_ids.device), last_hidden=last.to(input_ids.device))

    # ---- files -------------------------------------------------------------------------------------------------------

    def _load_tables(self) -> None:
        """Row tables and keys of all shards: 56 bytes a row."""
        rows, keys = [], []
        for number, shard in enumerate(self.index.shards):
            handle = self._handle(number)
            rows.append(handle.get_tensor("rows").numpy())
            keys.append(handle.get_tensor("keys").numpy())
            if len(rows[-1]) != shard.rows or int(rows[-1][:, 2].sum()) != shard.taps:
                raise DataError(f"shard {shard.file} of {str(self.path)!r} does not hold what the index says")
        self._rows = np.concatenate(rows)
        self._keys = np.concatenate(keys)
        self._firsts = np.array([shard.first_row for shard in self.index.shards], dtype=np.int64)
        heads = np.ascontiguousarray(self._keys[:, :8]).view(np.uint64)[:, 0]
        self._order = np.argsort(heads, kind="stable")
        self._heads = heads[self._order]

    def _find(self, key: bytes, hint: int) -> int | None:
        """Row of a key: row ``hint`` if it has that key, else the first one that has."""
        head = np.frombuffer(key[:8], dtype=np.uint64)[0]
        wanted = np.frombuffer(key, dtype=np.uint8)
        if 0 <= hint < len(self) and np.array_equal(self._keys[hint], wanted):
            return hint
        at = int(np.searchsorted(self._heads, head))
        while at < len(self._heads) and self._heads[at] == head:
            row = int(self._order[at])
            if np.array_equal(self._keys[row], wanted):
                return row
            at += 1
        return None

    def _handle(self, shard: int) -> Any:
        if shard in self._handles:
            self._handles.move_to_end(shard)
            return self._handles[shard]
        path = self.path / self.index.shards[shard].file
        try:
            handle = safe_open(str(path), framework="pt")
        except Exception as error:  # safetensors raises its own type for a damaged header
            raise DataError(f"shard {str(path)!r} cannot be opened ({error}): run the cache command again") from None
        self._handles[shard] = handle
        if len(self._handles) > OPEN_SHARDS:
            self._handles.popitem(last=False)
        return handle

    def _read(self, row: int, taps: Tensor, last: Tensor) -> None:
        """Fill zeroed taps [S, T*D] and last hidden states [S, D] of one row."""
        shard = int(np.searchsorted(self._firsts, row, side="right")) - 1
        handle = self._handle(shard)
        _, tap_start, tap_count, last_start, last_count = (int(value) for value in self._rows[row])
        if tap_count:
            stored = handle.get_slice("taps")[tap_start : tap_start + tap_count]
            if self.index.dtype == "fp8":
                scale = handle.get_slice("taps_scale")[tap_start : tap_start + tap_count]
                stored = dequantize(stored, scale, self.dtype)
            taps[:tap_count] = stored.to(self.dtype)
        if last_count:
            part = slice(last_start, last_start + last_count)
            places = handle.get_slice("last_index")[part].long()
            last[places] = handle.get_slice("last_hidden")[part].to(self.dtype)
