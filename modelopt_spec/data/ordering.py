"""A shuffle over all sources with flat memory: rows are sorted by a keyed hash of their content.

The order depends on the seed and the rows alone, not on the order of sources, files or workers, and exact copies
get equal keys, so they stand side by side. Sets that do not fit in memory go through bucket files: a row's bucket is
the top of its key, buckets are sorted one at a time.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from modelopt_spec.data.messages import Conversation

__all__ = ["KeyedRow", "RowOrder", "hash_share", "row_key"]

_HEAD = struct.Struct(">II")
_BUCKETS = 256
ROW_OVERHEAD = 1200
"""Bytes of the Python objects around the text of a row."""


@dataclass(frozen=True)
class KeyedRow:
    """A conversation with its place in the order and where it came from."""

    key: bytes
    """Sort key; equal for exact copies in a shuffled order."""
    digest: bytes
    """16 bytes that are equal for exact copies."""
    source: str
    index: int
    conversation: Conversation
    looping: bool

    def size(self) -> int:
        """Roughly the bytes that the row takes in memory."""
        conversation = self.conversation
        if conversation.text is not None:
            return len(conversation.text) + ROW_OVERHEAD
        return sum(len(message["content"]) for message in conversation.messages) + ROW_OVERHEAD


def row_key(digest: bytes, seed: int) -> bytes:
    """16 pseudo-random bytes of a row's digest under a seed."""
    return blake2b(digest, digest_size=16, key=seed.to_bytes(8, "big"), person=b"order").digest()


def hash_share(text: str, seed: int) -> float:
    """A number in [0, 1) that depends on the text and the seed only: below ``share`` means held out."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=seed.to_bytes(8, "big"), person=b"split")
    return int.from_bytes(digest.digest(), "big") / 2**64


class RowOrder:
    """Collects rows, then gives them back sorted by key; more than ``memory`` bytes go over disk.

    Args:
        memory: bytes of rows held at once.
        directory: where bucket files are made (and removed again).
        in_order: rows are added in the order of their keys already; they are given back as they came.
    """

    def __init__(self, memory: int, directory: str | Path | None = None, in_order: bool = False) -> None:
        self.memory = memory
        self.in_order = in_order
        self._directory = directory
        self._rows: list[KeyedRow] = []
        self._size = 0
        self._spill: Path | None = None
        self._files: list[BinaryIO] = []

    @property
    def spilled(self) -> bool:
        """Whether bucket files are in use."""
        return self._spill is not None

    def add(self, row: KeyedRow) -> None:
        """Take one row."""
        if self._spill is None:
            self._rows.append(row)
            self._size += row.size()
            if self._size > self.memory:
                self._start_spilling()
        else:
            self._spill_row(row)

    def __iter__(self) -> Iterator[KeyedRow]:
        """Rows in key order; rows of equal key in order of source position."""
        if self._spill is None:
            if not self.in_order:
                self._rows.sort(key=_sort_key)
            yield from self._rows
            return
        for file in self._files:
            file.close()
        for file in self._files:
            path = Path(file.name)
            yield from _read(path) if self.in_order else _sorted_file(path, 1, self.memory)

    def close(self) -> None:
        """Remove the bucket files."""
        for file in self._files:
            file.close()
        if self._spill is not None:
            shutil.rmtree(self._spill, ignore_errors=True)
            self._spill = None
        self._rows.clear()

    def _start_spilling(self) -> None:
        self._spill = Path(tempfile.mkdtemp(prefix=".mtsp-order-", dir=self._directory))
        count = 1 if self.in_order else _BUCKETS
        self._files = [open(self._spill / f"{bucket:03d}", "wb", buffering=1 << 15) for bucket in range(count)]  # noqa: SIM115
        for row in self._rows:
            self._spill_row(row)
        self._rows.clear()

    def _spill_row(self, row: KeyedRow) -> None:
        _write(self._files[0 if self.in_order else row.key[0]], row)


def _sort_key(row: KeyedRow) -> tuple[bytes, str, int]:
    return row.key, row.source, row.index


def _sorted_file(path: Path, depth: int, memory: int) -> Iterator[KeyedRow]:
    """Rows of one bucket in order; a bucket that is too large is split by the next byte of the key first."""
    if path.stat().st_size > memory and depth < 8:
        parts = [open(f"{path}-{part:03d}", "wb", buffering=1 << 15) for part in range(_BUCKETS)]  # noqa: SIM115
        for row in _read(path):
            _write(parts[row.key[depth]], row)
        for part in parts:
            part.close()
        path.unlink()
        for part in parts:
            yield from _sorted_file(Path(part.name), depth + 1, memory)
        return
    yield from sorted(_read(path), key=_sort_key)
    path.unlink()


def _write(file: BinaryIO, row: KeyedRow) -> None:
    conversation = row.conversation
    values: list[Any] = [
        row.source,
        row.index,
        row.looping,
        conversation.messages,
        conversation.text,
        conversation.tools,
        conversation.template_kwargs,
        conversation.unfinished,
    ]
    body = json.dumps(values, ensure_ascii=True).encode()
    file.write(_HEAD.pack(len(row.key), len(body)) + row.key + row.digest + body)


def _read(path: Path) -> Iterator[KeyedRow]:
    with open(path, "rb") as file:
        while head := file.read(_HEAD.size):
            key_size, body_size = _HEAD.unpack(head)
            key, digest = file.read(key_size), file.read(16)
            source, index, loops, *fields = json.loads(file.read(body_size))
            yield KeyedRow(key, digest, source, index, Conversation(*fields), loops)
