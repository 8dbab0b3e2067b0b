"""Rendering and tokenizing in chunks, in this process or in several."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

from modelopt_spec.data.chat import ChatRenderer, TokenRow
from modelopt_spec.data.messages import RowError
from modelopt_spec.data.ordering import KeyedRow

__all__ = ["render_chunks"]

Tag = TypeVar("Tag")
Results = list[list[TokenRow] | RowError]


def render_chunks(
    renderer: ChatRenderer, rows: Iterator[tuple[Tag, KeyedRow]], size: int, num_workers: int = 0
) -> Iterator[tuple[list[tuple[Tag, KeyedRow]], Results]]:
    """Chunks of ``size`` rows with their token rows, in order, whatever the number of workers."""
    chunks: Iterator[list[tuple[Tag, KeyedRow]]] = iter(lambda: list(islice(rows, size)), [])
    for chunk in chunks:
        yield chunk, renderer([row.conversation for _, row in chunk])
