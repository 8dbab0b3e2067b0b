"""Rendered text and its supervised character spans -> token ids and supervised token ranges."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from modelopt_spec.data.template import RenderedRow, Span
from modelopt_spec.errors import DataError

__all__ = ["EncodedRow", "RowTokenizer"]

MIN_SHARED = 16
"""Characters that a batch must share at its start before they are tokenized once for all."""


@dataclass(frozen=True)
class EncodedRow:
    """Ids of a row and half-open, ascending, disjoint ranges of supervised tokens."""

    ids: list[int]
    ranges: list[tuple[int, int]]
    straddling: int = 0
    """Tokens that begin before a span and reach into it; they are not supervised."""


class RowTokenizer:
    """Tokenizes batches of rendered rows. A token is supervised when its first character lies in a span.

    Rows of a batch often begin alike (a default system message). Text up to a special token is tokenized by itself
    whatever follows, so such a beginning is tokenized once; the first row of every batch is compared with its
    tokens in one piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
        self._isolated = tuple(
            str(token)
            for token in tokenizer.added_tokens_decoder.values()
            if token.special and not (token.lstrip or token.single_word or token.normalized)
        )
        self._share = bool(self._isolated)

    def encode(self, rows: Sequence[RenderedRow], *, special_tokens: bool = False) -> list[EncodedRow]:
        """Tokenize a batch; ``special_tokens`` adds the tokenizer's own around each row.

        Raises:
            DataError: a tokenizer without offsets merges tokens across the start of an answer.
        """
        if self.backend is None:
            return [self._without_offsets(row, special_tokens) for row in rows]
        self.backend.no_truncation()
        self.backend.no_padding()
        cut = 0 if special_tokens else self._shared_start(rows)
        start: list[int] = []
        if cut:
            start = self._ids(rows[0].text[:cut])
            if start + self._ids(rows[0].text[cut:]) != self._ids(rows[0].text):
                self._share, cut, start = False, 0, []
        encodings = self.backend.encode_batch([row.text[cut:] for row in rows], add_special_tokens=special_tokens)
        return [_encoded(encoding, row, start, cut) for encoding, row in zip(encodings, rows, strict=True)]

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def _shared_start(self, rows: Sequence[RenderedRow]) -> int:
        """Characters before the last special token of what all rows begin with, at most up to the first span."""
        if not self._share or len(rows) < 2:
            return 0
        texts = [row.text for row in rows]
        shared = os.path.commonprefix([min(texts), max(texts)])  # noqa: RUF071 (characters are meant)
        first_span = min((row.spans[0][0] for row in rows if row.spans), default=0)
        shared = shared[:first_span]
        cut = max(shared.rfind(token) for token in self._isolated)
        return cut if cut >= MIN_SHARED else 0

    def _without_offsets(self, row: RenderedRow, special_tokens: bool) -> EncodedRow:
        """Tokens up to each end of a span must be a prefix of the row's tokens."""
        ids = list(self.tokenizer(row.text, add_special_tokens=special_tokens)["input_ids"])
        if row.spans == ((0, len(row.text)),):
            return EncodedRow(ids, [(0, len(ids))])
        ranges = []
        for span in row.spans:
            edges = []
            for position in span:
                head = list(self.tokenizer(row.text[:position], add_special_tokens=special_tokens)["input_ids"])
                if ids[: len(head)] != head:
                    raise DataError(
                        f"{type(self.tokenizer).__name__} gives no offsets and merges tokens across the start of an "
                        "answer, so its supervised tokens cannot be told apart: use a fast tokenizer"
                    )
                edges.append(len(head))
            ranges.append((edges[0], edges[1]))
        return EncodedRow(ids, ranges)


def _encoded(encoding: Any, row: RenderedRow, start: list[int], cut: int) -> EncodedRow:
    """Put the shared start in front and turn spans into token ranges."""
    ids: list[int] = encoding.ids
    if len(row.spans) == 1 and row.spans[0] == (0, len(row.text)):
        return EncodedRow(start + ids, [(0, len(start) + len(ids))])
    count, length, shift = len(ids), len(row.text) - cut, len(start)
    ranges, straddling = [], 0
    for span in row.spans:
        first, last, reaching = _token_range(encoding, (span[0] - cut, span[1] - cut), length, count)
        straddling += reaching
        if last > first:
            ranges.append((first + shift, last + shift))
    return EncodedRow(start + ids if start else ids, ranges, straddling)


def _token_range(encoding: Any, span: Span, length: int, count: int) -> tuple[int, int, int]:
    """Tokens [first, last) whose first character lies in the span, and 1 if one begins before it and reaches in."""
    edges, reaching = [], 0
    for position in span:
        token = None
        at = position
        while at < length and (token := encoding.char_to_token(at)) is None:
            at += 1
        if token is None:
            edges.append(count)
        elif encoding.token_to_chars(token)[0] < position:
            edges.append(token + 1)
            reaching += position == span[0]
        else:
            edges.append(token)
    return edges[0], edges[1], reaching
