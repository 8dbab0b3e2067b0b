"""How large a cache will be, how it is cut into shards, and whether there is room for it: before a byte is written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelopt_spec.data.cache_format import (
    DTYPES,
    INDEX,
    NAMES,
    CacheIndex,
    RowNeeds,
    ShardPlan,
    finished_record,
    read_index,
    row_needs,
    write_json,
)
from modelopt_spec.data.config import CacheConfig
from modelopt_spec.errors import DataError
from modelopt_spec.records import TargetFeatures

__all__ = ["CacheSize", "count_needs", "estimate_cache", "needs_of", "plan_cache", "prepare_directory"]

DISK_MARGIN = 256 << 20
"""Bytes that a cache leaves free on its disk."""
ROW_BYTES = 16 + 5 * 8
"""Key and table entry of a row."""


@dataclass(frozen=True)
class CacheSize:
    """What a cache will take."""

    rows: int
    tokens: int
    tap_positions: int
    last_positions: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"{self.bytes / 2**30:.2f} GiB for {self.rows:,} rows ({self.tap_positions:,} tap and "
            f"{self.last_positions:,} last hidden positions of {self.tokens:,} tokens)"
        )


def estimate_cache(
    dataset: Any,
    num_taps: int,
    hidden_size: int,
    dtype: str = "bf16",
    positions: str = "needed",
) -> CacheSize:
    """Size of a cache of ``dataset`` (rows of input_ids and loss_mask) to within headers; nothing is run or written."""
    return _size(count_needs(dataset, positions), num_taps, hidden_size, dtype)


def count_needs(dataset: Any, positions: str) -> np.ndarray:
    """Length, stored tap positions and stored last hidden states of every row: int64 [N, 3]."""
    counts = np.zeros((len(dataset), 3), dtype=np.int64)
    for number in range(len(dataset)):
        needs = needs_of(dataset[number], positions)
        counts[number] = needs.length, needs.taps, len(needs.last)
    return counts


def needs_of(row: Mapping[str, Any], positions: str) -> RowNeeds:
    """:func:`row_needs` of a row of a data set."""
    segments = row.get("segment_ids")
    return row_needs(np.asarray(row["loss_mask"]), positions, None if segments is None else np.asarray(segments))


def _size(counts: np.ndarray, num_taps: int, hidden_size: int, dtype: str) -> CacheSize:
    tokens, taps, last = (int(value) for value in counts.sum(0))
    total = len(counts) * ROW_BYTES + taps * _tap_bytes(num_taps, hidden_size, dtype)
    total += last * _last_bytes(hidden_size, dtype)
    return CacheSize(len(counts), tokens, taps, last, total)


def _tap_bytes(num_taps: int, hidden_size: int, dtype: str) -> int:
    return num_taps * (hidden_size * DTYPES[dtype].itemsize + (4 if dtype == "fp8" else 0))


def _last_bytes(hidden_size: int, dtype: str) -> int:
    return 4 + hidden_size * (2 if dtype == "fp8" else DTYPES[dtype].itemsize)


def plan_cache(
    counts: np.ndarray,
    probe: TargetFeatures,
    layer_ids: Sequence[int],
    identity: Mapping[str, str],
    config: CacheConfig,
) -> CacheIndex:
    """Cut rows into shards of at most ``shard_mb`` (or one row).

    Args:
        counts: of :func:`count_needs`.
        probe: features of some row: they tell hidden size and dtype.
        layer_ids: taps.
        identity: fingerprints to record.
        config: stored dtype and positions, shard size.
    """
    assert probe.last_hidden is not None
    hidden = probe.last_hidden.shape[-1]
    if probe.taps.shape[-1] != hidden * len(layer_ids):
        raise DataError(f"taps of width {probe.taps.shape[-1]} are not {len(layer_ids)} layers of hidden size {hidden}")
    if probe.taps.dtype not in NAMES:
        raise DataError(
            f"features of dtype {probe.taps.dtype} cannot be cached: run the target in {sorted(NAMES.values())}"
        )
    source = NAMES[probe.taps.dtype]
    dtype = source if config.dtype == "auto" else config.dtype
    tap_bytes, last_bytes = _tap_bytes(len(layer_ids), hidden, dtype), _last_bytes(hidden, dtype)
    shards: list[ShardPlan] = []
    first, taps, last, size = 0, 0, 0, 0
    for number, (_, row_taps, row_last) in enumerate(counts.tolist()):
        row_bytes = row_taps * tap_bytes + row_last * last_bytes + ROW_BYTES
        if number > first and size + row_bytes > config.shard_mb << 20:
            shards.append(ShardPlan(f"shard-{len(shards):05d}.safetensors", first, number - first, taps, last))
            first, taps, last, size = number, 0, 0, 0
        taps, last, size = taps + row_taps, last + row_last, size + row_bytes
    shards.append(ShardPlan(f"shard-{len(shards):05d}.safetensors", first, len(counts) - first, taps, last))
    return CacheIndex(
        identity=dict(identity),
        layer_ids=tuple(int(i) for i in layer_ids),
        hidden_size=hidden,
        dtype=dtype,
        source_dtype=source,
        positions=config.positions,
        rows=len(counts),
        bytes=_size(counts, len(layer_ids), hidden, dtype).bytes,
        shards=tuple(shards),
    )


def prepare_directory(directory: Path, index: CacheIndex, config: CacheConfig) -> None:
    """Check room and an older cache, then write the index."""
    if config.max_gb is not None and index.bytes > config.max_gb * 2**30:
        raise DataError(
            f"this cache would take {index.bytes / 2**30:.1f} GiB, cache.max_gb is {config.max_gb}: raise it, store "
            "needed positions only, use fp8 or fewer taps, or train online"
        )
    if (directory / INDEX).is_file():
        before = read_index(directory)
        if before != index:
            names = [name for name, value in asdict(index).items() if asdict(before)[name] != value]
            raise DataError(
                f"{str(directory)!r} holds a cache with another {', '.join(names)}: remove it or use another directory"
            )
    elif directory.exists() and any(directory.iterdir()):
        raise DataError(f"{str(directory)!r} is not empty and holds no feature cache: use another directory")
    done = (finished_record(directory, shard) for shard in index.shards)
    needed = index.bytes - sum(record.bytes for record in done if record is not None)
    existing = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed + DISK_MARGIN > free:
        raise DataError(
            f"this cache takes {index.bytes / 2**30:.1f} GiB ({needed / 2**30:.1f} GiB still to write), but "
            f"{str(existing)!r} has {free / 2**30:.1f} GiB free: choose another disk, store needed positions only, use "
            "fp8 or fewer taps, or train online"
        )
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / INDEX).is_file():
        write_json(directory / INDEX, index.to_dict())
