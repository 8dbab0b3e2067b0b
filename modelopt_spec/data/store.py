"""Token rows on disk or in memory, as Arrow tables that `datasets` maps without loading them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from modelopt_spec.disk import sha256_of

__all__ = ["Sample", "SampleStore", "ShardInfo", "load_shards"]

SHARD_TOKENS = 32_000_000
"""Tokens of a shard: about 130 MB."""
BATCH_ROWS = 1000


@dataclass(frozen=True)
class Sample:
    """One token row as it is stored: input_ids [S] int32, loss_mask [S] bool, segment_ids [S] int32 in a packed row."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    segment_ids: np.ndarray | None = None


@dataclass(frozen=True)
class ShardInfo:
    """One Arrow file of a split."""

    file: str
    rows: int
    bytes: int
    sha256: str


@dataclass
class SampleStore:
    """Receives samples in order and ends as a dataset: Arrow files under ``directory``, or a table in memory."""

    directory: Path | None = None
    packed: bool = False
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    shards: list[ShardInfo] = field(default_factory=list)
    _hash: Any = field(default_factory=hashlib.sha256)
    _pending: list[Sample] = field(default_factory=list)
    _batches: list[pa.RecordBatch] = field(default_factory=list)
    _writer: Any = None
    _shard_tokens: int = 0
    _shard_rows: int = 0

    @property
    def schema(self) -> pa.Schema:
        """Columns of the table."""
        columns = [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_())), ("length", pa.int32())]
        if self.packed:
            columns.append(("segment_ids", pa.list_(pa.int32())))
        return pa.schema(columns)

    @property
    def fingerprint(self) -> str:
        """sha256 over the lengths, ids, masks and segments of all samples so far, batch by batch, in order."""
        self._flush()
        return self._hash.hexdigest()

    def add(self, sample: Sample) -> None:
        """Append one sample."""
        length = len(sample.input_ids)
        self.samples += 1
        self.tokens += length
        self.longest = max(self.longest, length)
        self._pending.append(sample)
        self._shard_tokens += length
        if len(self._pending) >= BATCH_ROWS or self._shard_tokens >= SHARD_TOKENS:
            self._flush()

    def finish(self) -> datasets.Dataset:
        """End the last shard and return everything as a dataset of numpy rows."""
        self._flush()
        self._end_shard()
        if self.directory is not None:
            return load_shards(self.directory, self.shards, self.schema)
        table = pa.Table.from_batches(self._batches, schema=self.schema)
        return datasets.Dataset(table, fingerprint=self.fingerprint[:16]).with_format("numpy")

    def _flush(self) -> None:
        if self._pending:
            batch = self._take_pending()
            self._shard_rows += batch.num_rows
            if self.directory is None:
                self._batches.append(batch)
            else:
                if self._writer is None:
                    self._start_shard()
                self._writer.write_batch(batch)
        if self._shard_tokens >= SHARD_TOKENS:
            self._end_shard()

    def _take_pending(self) -> pa.RecordBatch:
        """The pending samples as one batch; counts and hashes them."""
        samples, self._pending = self._pending, []
        lengths = np.fromiter((len(sample.input_ids) for sample in samples), dtype=np.int32, count=len(samples))
        values = [
            np.concatenate([sample.input_ids for sample in samples]),
            np.concatenate([sample.loss_mask for sample in samples]),
        ]
        self.supervised += int(values[1].sum())
        if self.packed:
            whole = [np.zeros(len(s.input_ids), np.int32) if s.segment_ids is None else s.segment_ids for s in samples]
            values.append(np.concatenate(whole))
        for array in (lengths, *values):
            self._hash.update(array)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        columns = [pa.ListArray.from_arrays(offsets, pa.array(array)) for array in values]
        return pa.RecordBatch.from_arrays([*columns[:2], pa.array(lengths), *columns[2:]], schema=self.schema)

    def _start_shard(self) -> None:
        assert self.directory is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        self._writer = pa.ipc.new_stream(str(self.directory / f"{len(self.shards):05d}.arrow"), self.schema)

    def _end_shard(self) -> None:
        if self._writer is not None and self.directory is not None:
            self._writer.close()
            path = self.directory / f"{len(self.shards):05d}.arrow"
            self.shards.append(ShardInfo(path.name, self._shard_rows, path.stat().st_size, sha256_of(path)))
        self._writer, self._shard_tokens, self._shard_rows = None, 0, 0


def load_shards(directory: Path, shards: Sequence[ShardInfo], schema: pa.Schema) -> datasets.Dataset:
    """Map the Arrow files of a split; nothing is read until rows are asked for."""
    if not shards:
        return datasets.Dataset(schema.empty_table()).with_format("numpy")
    parts = [datasets.Dataset.from_file(str(directory / shard.file)) for shard in shards]
    return (parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)).with_format("numpy")
