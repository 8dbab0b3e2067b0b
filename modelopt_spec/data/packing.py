"""Several short conversations in one row, kept apart by segment ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from modelopt_spec.data.store import Sample

__all__ = ["pack_samples"]

OPEN_ROWS = 32


def pack_samples(samples: Iterable[Sample], max_length: int, open_rows: int = OPEN_ROWS) -> Iterator[Sample]:
    """Best fit over a window of ``open_rows`` unfinished rows, so memory is flat and the order stays shuffled.

    Every sample goes whole into the open row with the least room that still takes it; when none does, the fullest row
    is given out. Segment ids count the conversations of a row from 0; a conversation that fills a row is its only
    segment. Masks stay as they are: what one conversation may teach about another is the business of segment_ids.
    """
    rows: list[list[Sample]] = []
    used: list[int] = []
    for sample in samples:
        length = len(sample.input_ids)
        fitting = [i for i, size in enumerate(used) if size + length <= max_length]
        if fitting:
            best = max(fitting, key=lambda i: used[i])
            rows[best].append(sample)
            used[best] += length
            continue
        if len(rows) >= open_rows:
            fullest = max(range(len(rows)), key=lambda i: used[i])
            yield _join(rows.pop(fullest))
            used.pop(fullest)
        rows.append([sample])
        used.append(length)
    for row in rows:
        yield _join(row)


def _join(samples: list[Sample]) -> Sample:
    segments = [np.full(len(sample.input_ids), i, dtype=np.int32) for i, sample in enumerate(samples)]
    return Sample(
        np.concatenate([sample.input_ids for sample in samples]),
        np.concatenate([sample.loss_mask for sample in samples]),
        np.concatenate(segments),
    )
