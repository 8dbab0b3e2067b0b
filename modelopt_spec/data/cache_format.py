"""The files of a feature cache: a plan of shards, safetensors shards, and one record beside each finished shard.

    index.json                     identity of everything that the features depend on, and the planned shards
    shard-00000.safetensors        taps, last hidden states and which rows and positions they belong to
    shard-00000.json               bytes and sha256; written when its shard is complete

A shard holds the rows [first_row, first_row + rows) of the data set, one behind the other:

    taps         [P, T*D]   P: stored tap positions of all its rows
    taps_scale   [P, T]     fp8 only
    last_hidden  [Q, D]     Q: stored last-hidden positions
    last_index   [Q]        int32, position in its row
    rows         [R, 5]     int64: length of the row, first and number of its taps, first and number of its last hiddens
    keys         [R, 16]    uint8, hash of the row's tokens (and of where its conversations start)

Legend: T taps, D hidden, S tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelopt_spec.disk import sha256_of
from modelopt_spec.errors import DataError

__all__ = [
    "CacheIndex",
    "RowNeeds",
    "ShardPlan",
    "ShardRecord",
    "check_identity",
    "dequantize",
    "finished_record",
    "quantize",
    "read_index",
    "row_key",
    "row_needs",
    "target_fingerprint",
    "write_json",
]

INDEX = "index.json"
VERSION = 1
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
NAMES = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FP8_MAX = 448.0
"""Largest float8_e4m3fn."""


@dataclass(frozen=True)
class ShardPlan:
    """What a shard will hold; fixed before anything is written."""

    file: str
    first_row: int
    rows: int
    taps: int
    """Tap positions of all rows together."""
    last: int
    """Last hidden states of all rows together."""


@dataclass(frozen=True)
class ShardRecord:
    """What a finished shard is."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class CacheIndex:
    """Everything in ``index.json``."""

    identity: dict[str, str]
    """Fingerprints of target, tokenizer, template and data, each checked when the cache is opened."""
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    """Stored dtype of the taps: float32, bf16, fp16 or fp8."""
    source_dtype: str
    """Dtype that the target gave and that reading gives back."""
    positions: str
    rows: int
    bytes: int
    """Estimated size of all shards."""
    shards: tuple[ShardPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"kind": "mtsp.features", "version": VERSION, **asdict(self)}

    @property
    def last_dtype(self) -> str:
        """Stored dtype of the last hidden states."""
        return "bf16" if self.dtype == "fp8" else self.dtype


# ---- identity --------------------------------------------------------------------------------------------------------


def target_fingerprint(model: nn.Module, samples: int = 64) -> str:
    """sha256 over names, shapes, dtypes and evenly spaced values of all weights of a model but its drafter.

    The device does not matter; another dtype is another target, since its features differ.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict(keep_vars=True).items()):
        if name.startswith("drafter.") or not isinstance(value, Tensor):
            continue
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        if value.is_meta or not value.numel():
            continue
        flat = value.detach().reshape(-1)
        places = torch.linspace(0, flat.numel() - 1, min(samples, flat.numel()), dtype=torch.float64).long()
        picked = flat[places.to(flat.device)]
        digest.update(picked.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_identity(index: CacheIndex, expected: Mapping[str, str], where: Path) -> None:
    """Compare fingerprints; every one that is expected must be in the cache and equal.

    Raises:
        DataError: naming what differs.
    """
    for name, value in expected.items():
        if index.identity.get(name) != value:
            found = index.identity.get(name)
            shown = "not recorded" if found is None else f"{found[:16]!r}"
            raise DataError(
                f"feature cache {str(where)!r} was made with another {name}: {shown}, now {value[:16]!r}; "
                "write the cache again for this run"
            )


# ---- rows ------------------------------------------------------------------------------------------------------------


def row_key(input_ids: np.ndarray | Tensor, position_ids: np.ndarray | Tensor | None = None) -> bytes:
    """16 bytes of the tokens of a row [S] and, where several conversations share it, of their positions [S]."""
    digest = hashlib.blake2b(np.ascontiguousarray(input_ids, dtype=np.int32).tobytes(), digest_size=16)
    if position_ids is not None:
        positions = np.ascontiguousarray(position_ids, dtype=np.int32)
        starts = np.flatnonzero(positions == 0).astype(np.int32)
        if len(starts) > 1:
            digest.update(b"starts" + starts.tobytes())
    return digest.digest()


@dataclass(frozen=True)
class RowNeeds:
    """What is stored of one row."""

    length: int
    taps: int
    """Taps of the first so many positions."""
    last: np.ndarray
    """Positions of the stored last hidden states, int32 [Q], ascending."""


def row_needs(loss_mask: np.ndarray, positions: str, segment_ids: np.ndarray | None = None) -> RowNeeds:
    """Which positions of a row training reads.

    A block at anchor a sees taps before a, and its labels are taught with the last hidden state one position before
    them; anchors and labels are supervised tokens.
    """
    length = len(loss_mask)
    if positions == "all":
        return RowNeeds(length, length, np.arange(length, dtype=np.int32))
    supervised = np.flatnonzero(loss_mask)
    before = supervised[supervised > 0] - 1
    if segment_ids is not None:
        before = before[segment_ids[before] == segment_ids[before + 1]]
    return RowNeeds(length, int(supervised[-1]) if len(supervised) else 0, before.astype(np.int32))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def quantize(values: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """[P, T*D] -> float8_e4m3fn [P, T*D] and float32 scales [P, T], one for each position and tap."""
    grouped = values.float().unflatten(-1, (groups, -1))
    scale = grouped.abs().amax(-1, keepdim=True) / FP8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (grouped / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of :func:`quantize`, rounded to ``dtype``."""
    grouped = values.float().unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.unsqueeze(-1)).flatten(-2).to(dtype)


# ---- files -----------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write and sync a JSON file that is either old or new."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_index(directory: Path) -> CacheIndex:
    """Read ``index.json``.

    Raises:
        DataError: there is none, or it is of another kind or version.
    """
    try:
        values = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{str(directory)!r} is not a feature cache ({error})") from None
    if (values.pop("kind", None), values.pop("version", None)) != ("mtsp.features", VERSION):
        raise DataError(f"{str(directory / INDEX)!r} is not a feature cache of version {VERSION}: write it again")
    values["layer_ids"] = tuple(values["layer_ids"])
    values["shards"] = tuple(ShardPlan(**shard) for shard in values["shards"])
    return CacheIndex(**values)


def finished_record(directory: Path, shard: ShardPlan, verify: bool = False) -> ShardRecord | None:
    """The record of a shard that is complete on disk, else None; with ``verify`` its checksum is computed again."""
    path = directory / shard.file
    try:
        record = ShardRecord(**json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))
        if path.stat().st_size != record.bytes:
            return None
    except (OSError, ValueError, TypeError):
        return None
    if verify and sha256_of(path) != record.sha256:
        return None
    return record
