"""What a drafter would learn from: rows with their supervised tokens marked, and statistics over all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from modelopt_spec.data.report import DataReport

__all__ = ["Histogram", "inspect_rows", "marked_row"]

SUPERVISED_STYLE = "bold green"
CONTEXT_STYLE = "dim"
SEGMENT_STYLE = "bold yellow"
BINS = 40
_SCAN_ROWS = 2000


@dataclass(frozen=True)
class Histogram:
    """Counts between ascending edges (one more than counts)."""

    edges: list[float]
    counts: list[int]

    @classmethod
    def of(cls, values: np.ndarray, bins: int = BINS, limits: tuple[float, float] | None = None) -> Histogram:
        """Equal bins from the smallest to the largest value, or over ``limits``."""
        if not len(values):
            return cls([0.0, 1.0], [0])
        counts, edges = np.histogram(values, bins=bins, range=limits)
        return cls([float(edge) for edge in edges], [int(count) for count in counts])


def inspect_rows(dataset: datasets.Dataset, report: DataReport | None = None) -> dict[str, Any]:
    """Statistics of token rows as plain JSON (kind ``mtsp.data_inspection``), reading every row once with flat memory.

    Keys: samples, tokens, supervised_tokens, conversations, length / supervised_tokens_per_sample / supervised_share
    (each with ``histogram`` {edges, counts}, ``mean``, and percentiles ``p5``, ``p50``, ``p95``, ``max``),
    looping_share (of kept rows; None without a report) and ``report``.
    """
    lengths, supervised, conversations = [], [], 0
    for batch in _batches(dataset):
        for row in batch:
            lengths.append(len(row["input_ids"]))
            supervised.append(int(row["loss_mask"].sum()))
            conversations += int(row["segment_ids"][-1]) + 1 if "segment_ids" in row else 1
    length, taught = np.array(lengths, dtype=np.int64), np.array(supervised, dtype=np.int64)
    share = taught / np.maximum(length, 1)
    looping = report.looping_rows / report.rows_kept if report is not None and report.rows_kept else None
    return {
        "kind": "mtsp.data_inspection",
        "version": 1,
        "samples": len(length),
        "conversations": conversations,
        "tokens": int(length.sum()),
        "supervised_tokens": int(taught.sum()),
        "length": _summary(length),
        "supervised_tokens_per_sample": _summary(taught),
        "supervised_share": _summary(share, (0.0, 1.0)),
        "looping_share": looping,
        "report": report.to_dict() if report is not None else None,
    }


def _batches(dataset: datasets.Dataset) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(dataset), _SCAN_ROWS):
        columns = dataset[start : start + _SCAN_ROWS]
        names = [name for name in ("input_ids", "loss_mask", "segment_ids") if name in columns]
        yield [dict(zip(names, values, strict=True)) for values in zip(*(columns[n] for n in names), strict=True)]


def _summary(values: np.ndarray, limits: tuple[float, float] | None = None) -> dict[str, Any]:
    histogram = Histogram.of(values, limits=limits)
    if not len(values):
        return {"histogram": {"edges": histogram.edges, "counts": histogram.counts}, "mean": 0.0, "max": 0.0}
    low, middle, high = (float(value) for value in np.percentile(values, [5, 50, 95]))
    return {
        "histogram": {"edges": histogram.edges, "counts": histogram.counts},
        "mean": float(values.mean()),
        "p5": low,
        "p50": middle,
        "p95": high,
        "max": float(values.max()),
    }


def marked_row(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> Text:
    """One row for a terminal: supervised text bold green, the rest dim, a rule between packed conversations.

    Tokens are decoded in runs of equal supervision, so characters that span several tokens come out whole unless
    supervision begins inside of one.
    """
    ids = np.asarray(row["input_ids"])
    mask = np.asarray(row["loss_mask"], dtype=bool)
    segments = np.zeros(len(ids), dtype=np.int64) if row.get("segment_ids") is None else np.asarray(row["segment_ids"])
    cut = len(ids) if max_tokens is None else min(len(ids), max_tokens)
    text = Text()
    for start, end in _runs(mask[:cut], segments[:cut]):
        if start and segments[start] != segments[start - 1]:
            text.append("\n" + "─" * 30 + "\n", style=SEGMENT_STYLE)
        style = SUPERVISED_STYLE if mask[start] else CONTEXT_STYLE
        text.append(str(tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)), style=style)
    if cut < len(ids):
        text.append(f"\n… {len(ids) - cut} more tokens", style=SEGMENT_STYLE)
    return text


def _runs(mask: np.ndarray, segments: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of equal supervision and segment."""
    if not len(mask):
        return []
    changes = np.flatnonzero((mask[1:] != mask[:-1]) | (segments[1:] != segments[:-1])) + 1
    edges: Sequence[int] = [0, *(int(c) for c in changes), len(mask)]
    return list(itertools.pairwise(edges))
