"""Shards on their way to the disk: one is written by a thread of its own while the next one is filled.

A shard is laid out in memory as the safetensors file that it becomes, so nothing is copied between filling and writing,
and two buffers are used in turn.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.data.cache_format import ShardPlan, ShardRecord, write_json
from modelopt_spec.errors import DataError

__all__ = ["ShardBuffer", "ShardWriter", "write_shard"]

_CHUNK = 16 << 20
_NAMES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


class ShardBuffer:
    """Memory that holds one safetensors file; it grows to the largest and is used again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def layout(self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
        """Write the header of a file with these tensors and return them, uninitialised, as parts of the buffer.

        The format: 8 bytes with the length of the header, the header as JSON padded to a multiple of 8, then the
        tensors without gaps. Wider elements come first, so every tensor is aligned.
        """
        order = sorted(shapes, key=lambda name: -shapes[name][0].itemsize)
        header: dict[str, Any] = {"__metadata__": {"kind": "mtsp.features"}}
        sizes, offset = {}, 0
        for name in order:
            dtype, shape = shapes[name]
            sizes[name] = math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, offset + sizes[name]],
            }
            offset += sizes[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        self._used = start + offset
        if self._memory.numel() < self._used:
            self._memory = torch.empty(self._used, dtype=torch.uint8)
        head = bytearray(len(text).to_bytes(8, "little") + text)
        self._memory[:start].copy_(torch.frombuffer(head, dtype=torch.uint8))
        tensors = {}
        for name in order:
            dtype, shape = shapes[name]
            tensors[name] = self._memory[start : start + sizes[name]].view(dtype).view(shape)
            start += sizes[name]
        return tensors

    def data(self) -> memoryview:
        """The bytes of the file."""
        array: Any = self._memory[: self._used].numpy()
        return memoryview(array)


class ShardWriter:
    """Two buffers and the thread that writes them.

    Used as a context manager; leaving it waits for everything that was handed over.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._free: queue.Queue[ShardBuffer] = queue.Queue()
        self._full: queue.Queue[tuple[ShardPlan, ShardBuffer] | None] = queue.Queue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="mtsp-features", daemon=True)
        for _ in range(2):
            self._free.put(ShardBuffer())

    def __enter__(self) -> ShardWriter:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, *rest: object) -> None:
        self._full.put(None)
        self._thread.join()
        if kind is None:
            self._raise()

    def free_buffer(self) -> ShardBuffer:
        """A buffer to fill; waits until one has been written.

        Raises:
            DataError: an earlier shard could not be written.
        """
        buffer = self._free.get()
        self._raise()
        return buffer

    def put(self, shard: ShardPlan, buffer: ShardBuffer) -> None:
        """Hand a filled buffer over."""
        self._full.put((shard, buffer))

    def _raise(self) -> None:
        if self._error is not None:
            raise DataError(
                f"cannot write to {str(self.directory)!r} ({self._error}): finished shards stay, make room, run again"
            ) from self._error

    def _run(self) -> None:
        while (item := self._full.get()) is not None:
            shard, buffer = item
            if self._error is None:
                try:
                    write_shard(self.directory, shard, buffer.data())
                except OSError as error:
                    self._error = error
            self._free.put(buffer)


def write_shard(directory: Path, shard: ShardPlan, data: memoryview) -> None:
    """Write one shard beside its place, move it there, then write its record. Hashing runs beside writing.

    Raises:
        OSError: the disk is full or gone; nothing is left behind.
    """
    final = directory / shard.file
    temporary = final.with_name(f".{shard.file}.tmp-{os.getpid()}")
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
