"""Rendering and tokenizing in chunks, with the results in order: in this process or in several.

In one process the template of the next chunk runs while the tokenizer, which lets go of Python's lock and uses all
cores, works on this one. Several processes pay off where templates are the bottleneck.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from modelopt_spec.data.chat import ChatRenderer, CutRow
from modelopt_spec.data.messages import Conversation, RowError
from modelopt_spec.data.store import Sample

__all__ = ["TokenizedRow", "render_chunks"]

Item = TypeVar("Item")


@dataclass(frozen=True)
class TokenizedRow:
    """One token row as arrays, with what the length limit took from it."""

    sample: Sample
    lost_tokens: int
    lost_supervised: int
    straddling: int


Results = list[list[TokenizedRow] | RowError]


def render_chunks(
    renderer: ChatRenderer,
    items: Iterator[Item],
    conversation_of: Callable[[Item], Conversation],
    size: int,
    num_workers: int = 0,
) -> Iterator[tuple[list[Item], Results]]:
    """Chunks of ``size`` items, each with the token rows of its conversations; order and results do not depend on
    ``num_workers``. At most ``2 * num_workers + 3`` chunks are in flight, so memory is flat.
    """
    chunks: Iterator[list[Item]] = iter(lambda: list(islice(items, size)), [])
    waiting: deque[tuple[list[Item], Future[Results]]] = deque()
    with _executor(renderer, num_workers) as executor:
        for chunk in chunks:
            conversations = [conversation_of(item) for item in chunk]
            if num_workers:
                future = executor.submit(_work, conversations)
            else:
                rendered = renderer.render_all(conversations)
                future = executor.submit(_tokenize, renderer, rendered)
            waiting.append((chunk, future))
            if len(waiting) > 2 * num_workers + 2:
                done, result = waiting.popleft()
                yield done, result.result()
        while waiting:
            done, result = waiting.popleft()
            yield done, result.result()


def _executor(renderer: ChatRenderer, num_workers: int) -> Executor:
    if not num_workers:
        return ThreadPoolExecutor(1, thread_name_prefix="mtsp-tokenize")
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    return ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context(method),
        initializer=_start,
        initargs=(renderer.tokenizer, renderer.config),
    )


_worker: dict[str, ChatRenderer] = {}


def _start(tokenizer: Any, config: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker["renderer"] = ChatRenderer(tokenizer, config)


def _work(conversations: list[Conversation]) -> Results:
    renderer = _worker["renderer"]
    return _tokenize(renderer, renderer.render_all(conversations))


def _tokenize(renderer: ChatRenderer, rendered: list[Any]) -> Results:
    return renderer.tokenize_as(_tokenized, rendered)


def _tokenized(row: CutRow) -> TokenizedRow:
    mask = np.zeros(len(row.ids), dtype=np.bool_)
    for first, last in row.ranges:
        mask[first:last] = True
    sample = Sample(np.array(row.ids, dtype=np.int32), mask)
    return TokenizedRow(sample, row.lost_tokens, row.lost_supervised, row.straddling)
