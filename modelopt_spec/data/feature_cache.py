"""Write the target's features of a data set once, to read them in every epoch and on every rank.

The size is known and compared with the disk before the first byte. Shards are written one at a time, each complete or
absent, so a run that dies goes on where it was; several processes share the work by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from modelopt_spec.data.cache_format import (
    DTYPES,
    CacheIndex,
    ShardPlan,
    finished_record,
    quantize,
    read_index,
    row_key,
)
from modelopt_spec.data.cache_plan import count_needs, needs_of, plan_cache, prepare_directory
from modelopt_spec.data.cache_writer import ShardBuffer, ShardWriter
from modelopt_spec.data.collate import restart_positions
from modelopt_spec.data.config import CacheConfig
from modelopt_spec.errors import DataError
from modelopt_spec.progress import progress
from modelopt_spec.records import TargetFeatures

__all__ = ["FeatureTarget", "verify_cache", "write_cache"]


PROBE_TOKENS = 8
"""Tokens that the target first runs on, to learn the width and dtype of its features."""


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
    probe = _features(target, [{"input_ids": dataset[0]["input_ids"][:PROBE_TOKENS]}], layer_ids)
    index = plan_cache(counts, probe, layer_ids, identity, settings)
    prepare_directory(directory, index, settings)
    mine = [shard for number, shard in enumerate(index.shards) if number % world_size == rank]
    todo = [shard for shard in mine if finished_record(directory, shard) is None]
    with ShardWriter(directory) as writer, progress("features", sum(s.rows for s in todo), quiet=quiet) as advance:
        for shard in todo:
            buffer = writer.free_buffer()
            _fill_shard(buffer, target, dataset, shard, counts, index, settings, advance)
            writer.put(shard, buffer)
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


def _fill_shard(
    buffer: ShardBuffer,
    target: FeatureTarget,
    dataset: Any,
    shard: ShardPlan,
    counts: np.ndarray,
    index: CacheIndex,
    config: CacheConfig,
    advance: Any,
) -> None:
    """Lay a shard out in memory and fill it, batch by batch."""
    wanted = counts[shard.first_row : shard.first_row + shard.rows]
    num_taps = len(index.layer_ids)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "rows": (torch.int64, (shard.rows, 5)),
        "last_index": (torch.int32, (shard.last,)),
        "taps": (DTYPES[index.dtype], (shard.taps, index.hidden_size * num_taps)),
        "last_hidden": (DTYPES[index.last_dtype], (shard.last, index.hidden_size)),
        "keys": (torch.uint8, (shard.rows, 16)),
    }
    if index.dtype == "fp8":
        shapes["taps_scale"] = (torch.float32, (shard.taps, num_taps))
    tensors = buffer.layout(shapes)
    tap_starts = np.concatenate([[0], np.cumsum(wanted[:, 1])]).astype(np.int64)
    last_starts = np.concatenate([[0], np.cumsum(wanted[:, 2])]).astype(np.int64)
    columns = (wanted[:, 0], tap_starts[:-1], wanted[:, 1], last_starts[:-1], wanted[:, 2])
    tensors["rows"].copy_(torch.from_numpy(np.stack(columns, axis=1)))
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
            if index.dtype == "fp8":
                values, scale = quantize(values, num_taps)
                tensors["taps_scale"][part].copy_(scale)
            tensors["taps"][part].copy_(values)
            chosen = torch.as_tensor(need.last, dtype=torch.long, device=found.last_hidden.device)
            tensors["last_hidden"][last_part].copy_(found.last_hidden[place, chosen])
            tensors["last_index"][last_part].copy_(torch.from_numpy(need.last))
            tensors["keys"][number].copy_(torch.frombuffer(bytearray(_key_of(row)), dtype=torch.uint8))
        advance(len(batch))


def _key_of(row: Mapping[str, Any]) -> bytes:
    segments = row.get("segment_ids")
    if segments is None:
        return row_key(np.asarray(row["input_ids"]))
    positions = restart_positions(torch.as_tensor(np.asarray(segments, dtype=np.int64)))
    return row_key(np.asarray(row["input_ids"]), positions.numpy())
