"""Writing a draft's files: safetensors in one piece or in shards with an index, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from modelopt_spec.checkpoints.safe_read import INDEX_FILE, WEIGHTS_FILE
from modelopt_spec.errors import ConfigError

__all__ = ["parse_dtype", "write_json", "write_tensors"]

MAX_SHARD_BYTES = 5 << 30
_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def parse_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """``float32``, ``bfloat16`` or ``float16`` (or fp32, bf16, fp16) as a torch type; None stays None."""
    if name is None or isinstance(name, torch.dtype):
        return name
    if name not in _DTYPES:
        raise ConfigError(
            f"dtype is {name!r}: use one of {', '.join(_DTYPES)}, or leave it unset to keep the weights' type"
        )
    return _DTYPES[name]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_tensors(
    tensors: Mapping[str, Tensor], directory: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[str]:
    """Write tensors to a directory, in several files with an index once they exceed ``max_shard_bytes``.

    Returns:
        The names of the files.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        bytes_needed = tensor.numel() * tensor.element_size()
        if shards[-1] and size + bytes_needed > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous().clone()
        size += bytes_needed
    if len(shards) == 1:
        save_file(shards[0], directory / WEIGHTS_FILE, metadata={"format": "pt"})
        return [WEIGHTS_FILE]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards):
        save_file(shard, directory / name, metadata={"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return [*names, INDEX_FILE]
