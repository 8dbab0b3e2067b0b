"""Write the target's features of a data set once, to read them in every epoch and on every rank.

The size is known and compared with the disk before the first byte. Shards are written one at a time, each complete or
absent, so a run that dies goes on where it was; several processes share the work by rank.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from modelopt_spec.data.cache_format import (
    DTYPES,
    CacheIndex,
    ShardPlan,
    ShardRecord,
    finished_record,
    quantize,
    read_index,
    row_key,
    write_json,
)
from modelopt_spec.data.cache_plan import count_needs, needs_of, plan_cache, prepare_directory
from modelopt_spec.data.collate import restart_positions
from modelopt_spec.data.config import CacheConfig
from modelopt_spec.errors import DataError
from modelopt_spec.progress import progress
from modelopt_spec.records import TargetFeatures

__all__ = ["FeatureTarget", "verify_cache", "write_cache"]

_CHUNK = 16 << 20


class FeatureTarget(Protocol):
    """The part of a target that is needed here."""

    def features(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> TargetFeatures:
        """Taps [B, S, T*D] and last hidden states [B, S, D]."""
        ...


def write_cache(
    target: FeatureTarget,
    dataset: Any,
    layer_ids: Sequence[int],
    path: str | Path,
    identity: Mapping[str, str],
    config: CacheConfig | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    quiet: bool = False,
) -> CacheIndex:
    """Write the features of every row, or go on with a cache that was begun.

    Args:
        target: anything with the target protocol's ``features``. It runs on its own device, in inference mode.
        dataset: map-style rows of input_ids, loss_mask and, in packed sets, segment_ids.
        layer_ids: taps.
        path: directory of the cache.
        identity: fingerprints that reading checks, at least ``target`` and ``data``.
        config: dtype, stored positions, shard size.
        rank: this process's share of the shards: those with number ``rank`` modulo ``world_size``.
        world_size: processes that write into the same directory.
        quiet: no progress bar.

    Returns:
        The index; the cache is complete when the processes of all ranks have returned.

    Raises:
        DataError: not enough room on the disk (before anything is written), a cache of something else at ``path``, or
            a disk that fills up in between (finished shards stay).
    """
    settings = config or CacheConfig()
    missing = {"target", "data"} - set(identity)
    if missing:
        raise DataError(f"identity of a feature cache lacks {sorted(missing)}: features of unknown origin are no use")
    directory = Path(path).expanduser()
    if not len(dataset):
        raise DataError("the data set is empty: there is nothing to cache")
    counts = count_needs(dataset, settings.positions)
    probe = _features(target, [dataset[0]], layer_ids)
    index = plan_cache(counts, probe, layer_ids, identity, settings)
    prepare_directory(directory, index, settings)
    mine = [shard for number, shard in enumerate(index.shards) if number % world_size == rank]
    todo = [shard for shard in mine if finished_record(directory, shard) is None]
    with _Writer(directory) as writer, progress("features", sum(s.rows for s in todo), quiet=quiet) as advance:
        for shard in todo:
            writer.put(shard, _shard_tensors(target, dataset, shard, counts, index, settings, advance))
    return index


def verify_cache(path: str | Path) -> list[str]:
    """Read every shard and return the files that are missing, cut short or damaged."""
    directory = Path(path).expanduser()
    index = read_index(directory)
    return [shard.file for shard in index.shards if finished_record(directory, shard, verify=True) is None]


# ---- computing -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _features(target: FeatureTarget, rows: Sequence[Mapping[str, Any]], layer_ids: Sequence[int]) -> TargetFeatures:
    """Features of rows padded on the right to one batch; attention is causal, so padding changes nothing."""
    device = getattr(target, "device", torch.device("cpu"))
    size = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros((len(rows), size), dtype=torch.long)
    positions = torch.zeros((len(rows), size), dtype=torch.long)
    packed = False
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[place, :length] = torch.as_tensor(np.asarray(row["input_ids"], dtype=np.int64))
        segments = row.get("segment_ids")
        packed |= segments is not None
        positions[place, :length] = (
            torch.arange(length)
            if segments is None
            else restart_positions(torch.as_tensor(np.asarray(segments, dtype=np.int64)))
        )
    arguments = {"position_ids": positions.to(device)} if packed else {}
    with torch.autocast(device.type, enabled=False):
        return target.features(ids.to(device), tuple(layer_ids), **arguments)


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows of similar length together, padded size at most ``batch_tokens`` (or one row)."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _shard_tensors(
    target: FeatureTarget,
    dataset: Any,
    shard: ShardPlan,
    counts: np.ndarray,
    index: CacheIndex,
    config: CacheConfig,
    advance: Any,
) -> dict[str, Tensor]:
    wanted = counts[shard.first_row : shard.first_row + shard.rows]
    width = index.hidden_size * len(index.layer_ids)
    taps = torch.empty((shard.taps, width), dtype=DTYPES[index.dtype])
    scale = torch.empty((shard.taps, len(index.layer_ids))) if index.dtype == "fp8" else None
    last = torch.empty((shard.last, index.hidden_size), dtype=DTYPES[index.last_dtype])
    last_index = torch.empty(shard.last, dtype=torch.int32)
    tap_starts = np.concatenate([[0], np.cumsum(wanted[:, 1])]).astype(np.int64)
    last_starts = np.concatenate([[0], np.cumsum(wanted[:, 2])]).astype(np.int64)
    keys = np.zeros((shard.rows, 16), dtype=np.uint8)
    for batch in _batches(wanted[:, 0].tolist(), config.batch_tokens):
        rows = [dataset[shard.first_row + number] for number in batch]
        found = _features(target, rows, index.layer_ids)
        assert found.last_hidden is not None
        for place, number in enumerate(batch):
            row = rows[place]
            need = needs_of(row, index.positions)
            if (need.length, need.taps, len(need.last)) != tuple(wanted[number]):
                raise DataError(f"row {shard.first_row + number} of the data set changed while its features were made")
            part = slice(int(tap_starts[number]), int(tap_starts[number + 1]))
            last_part = slice(int(last_starts[number]), int(last_starts[number + 1]))
            values = found.taps[place, : need.taps]
            if scale is None:
                taps[part] = values.to(taps.dtype)
            else:
                small, factors = quantize(values, len(index.layer_ids))
                taps[part], scale[part] = small.cpu(), factors.cpu()
            chosen = torch.as_tensor(need.last, dtype=torch.long, device=found.last_hidden.device)
            last[last_part] = found.last_hidden[place, chosen].to(last.dtype)
            last_index[last_part] = torch.from_numpy(need.last)
            keys[number] = np.frombuffer(_key_of(row), dtype=np.uint8)
        advance(len(batch))
    columns = (wanted[:, 0], tap_starts[:-1], wanted[:, 1], last_starts[:-1], wanted[:, 2])
    table = np.stack(columns, axis=1)
    tensors = {
        "taps": taps,
        "last_hidden": last,
        "last_index": last_index,
        "rows": torch.from_numpy(np.ascontiguousarray(table)),
        "keys": torch.from_numpy(keys),
    }
    return tensors if scale is None else {**tensors, "taps_scale": scale}


def _key_of(row: Mapping[str, Any]) -> bytes:
    segments = row.get("segment_ids")
    if segments is None:
        return row_key(np.asarray(row["input_ids"]))
    positions = restart_positions(torch.as_tensor(np.asarray(segments, dtype=np.int64)))
    return row_key(np.asarray(row["input_ids"]), positions.numpy())


# ---- writing ---------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes shards in a thread of its own while the target works on the next one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._queue: queue.Queue[tuple[ShardPlan, dict[str, Tensor]] | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mtsp-features", daemon=True)

    def __enter__(self) -> _Writer:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, *rest: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if kind is None:
            self._raise()

    def put(self, shard: ShardPlan, tensors: dict[str, Tensor]) -> None:
        """Hand a shard over; waits while the one before is being written."""
        self._raise()
        self._queue.put((shard, tensors))

    def _raise(self) -> None:
        if self._error is not None:
            raise DataError(
                f"cannot write to {str(self.directory)!r} ({self._error}): finished shards stay, make room and rerun"
            ) from self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is None:
                try:
                    _write_shard(self.directory, *item)
                except OSError as error:
                    self._error = error


def _write_shard(directory: Path, shard: ShardPlan, tensors: dict[str, Tensor]) -> None:
    """Write one shard beside its place, move it there, then write its record. Hashing runs beside writing."""
    final = directory / shard.file
    temporary = final.with_name(f".{shard.file}.tmp-{os.getpid()}")
    data = memoryview(save(tensors, metadata={"kind": "mtsp.features"}))
    digest = hashlib.sha256()
    hashing = threading.Thread(target=digest.update, args=(data,))
    hashing.start()
    try:
        with open(temporary, "wb", buffering=0) as file:
            for start in range(0, len(data), _CHUNK):
                part = data[start : start + _CHUNK]
                while part:
                    part = part[file.write(part) :]
            os.fsync(file.fileno())
        os.replace(temporary, final)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        hashing.join()
    record = ShardRecord(shard.file, len(data), digest.hexdigest())
    write_json(final.with_suffix(".json"), asdict(record))
