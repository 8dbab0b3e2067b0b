"""Sources -> token rows of a train and a validation split, in one pass over the rows and one over their order.

read -> one shape, key, looping flag -> order (:class:`RowOrder`) -> drop copies, split by prompt -> render and tokenize
in chunks -> pack -> store. Memory holds ``data.memory_mb`` of raw text and one chunk.
"""

from __future__ import annotations

import contextlib
import gc
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import datasets
from transformers import PreTrainedTokenizerBase

from modelopt_spec.data.chat import ChatRenderer
from modelopt_spec.data.config import DataConfig, SourceConfig
from modelopt_spec.data.looping import looping
from modelopt_spec.data.messages import Conversation, RowError, first_prompt, parse_row
from modelopt_spec.data.ordering import KeyedRow, RowOrder, hash_share, row_key
from modelopt_spec.data.packing import pack_samples
from modelopt_spec.data.report import FILTERED, DataReport
from modelopt_spec.data.sources import LINES, place, read_prompts, read_rows
from modelopt_spec.data.store import Sample, SampleStore
from modelopt_spec.data.workers import TokenizedRow, render_chunks
from modelopt_spec.errors import DataError

__all__ = ["Split", "build_splits"]

CHUNK_ROWS = 1000
CHECK_AFTER = 1000
"""Rows after which a share of bad rows above the limit ends the run early."""

Progress = Callable[[str, int], None]


@dataclass
class Split:
    """A split while it is filled, and what has happened to its rows."""

    name: str
    store: SampleStore
    skipped: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    read: int = 0
    looping: int = 0
    truncated: int = 0
    lost_tokens: int = 0
    lost_supervised: int = 0
    straddling: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    dataset: datasets.Dataset | None = None

    def report(self) -> DataReport:
        """The counts so far."""
        store = self.store
        return DataReport(
            rows_read=self.read,
            rows_kept=self.kept,
            skipped=dict(self.skipped),
            samples=store.samples,
            tokens=store.tokens,
            supervised_tokens=store.supervised,
            truncated=self.truncated,
            lost_tokens=self.lost_tokens,
            lost_supervised=self.lost_supervised,
            straddling_tokens=self.straddling,
            looping_rows=self.looping,
            longest=store.longest,
            fingerprint=store.fingerprint,
            rows_by_source=dict(self.by_source),
            examples=dict(self.examples),
        )


class _Rejects:
    """Counts rows that are left out and writes the unusable ones to a file."""

    def __init__(self, limit: float, path: Path | None, told: Path | None = None) -> None:
        """Args: limit: of the share; path: the file, if any; told: where it will be once the run has failed."""
        self.limit = limit
        self.path = path
        self.told = told or path
        self._file: IO[str] | None = None

    def add(self, split: Split, source: str, index: int, error: RowError) -> None:
        split.skipped[error.reason] += 1
        if error.reason in FILTERED:
            return
        split.examples.setdefault(error.reason, f"{place(source, index)}: {error.detail}")
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close())
        line = {"line": index + 1} if source.endswith(LINES) else {}
        entry = {"source": source, "row": index, **line, "reason": error.reason, "detail": error.detail}
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def check(self, split: Split, examined: int) -> None:
        bad = sum(count for reason, count in split.skipped.items() if reason not in FILTERED)
        if examined and bad / examined > self.limit:
            worst = {r: n for r, n in split.skipped.most_common() if r not in FILTERED}
            lines = "; ".join(f"{reason} {count} (e.g. {split.examples[reason]})" for reason, count in worst.items())
            where = f"; all of them: {self.told}" if self.told else ""
            self.close()
            raise DataError(
                f"{bad} of {examined} rows of {split.name} cannot be used, more than data.max_bad_share "
                f"{self.limit}: {lines}{where}"
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def build_splits(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path | None = None,
    progress: Progress | None = None,
    *,
    rejects_file: Path | None = None,
    rejects_told: Path | None = None,
) -> dict[str, Split]:
    """Build the splits that a configuration asks for.

    Args:
        config: the sources and what to do with their rows.
        tokenizer: of the target.
        directory: where Arrow shards, rejects and temporary files go; without it everything stays in memory.
        progress: called with a stage name and the number of rows that went through it.
        rejects_file: where unusable rows are written, instead of the directory's ``rejects.jsonl``.
        rejects_told: where the caller moves that file when the rows cannot be used, for the message.

    Returns:
        ``train`` and, if held-out rows are asked for, ``validation``; each with its dataset.

    Raises:
        DataError: no usable row, too many bad ones, or a source that cannot be read.
    """
    train = Split("train", SampleStore(directory and directory / "train", packed=config.pack))
    validation = Split("validation", SampleStore(directory and directory / "validation"))
    path = rejects_file or (directory and directory / "rejects.jsonl")
    rejects = _Rejects(config.max_bad_share, path, rejects_told)
    excluded = {
        " ".join(turn.split()) for path in config.exclude_prompts for turns in read_prompts(path) for turn in turns
    }
    held_out: set[str] = set()
    report = progress or (lambda stage, count: None)
    with _no_cycle_collection(), contextlib.closing(rejects):
        if config.validation:
            held_out = _fill_held_out(config, tokenizer, validation, rejects, directory, report)
        _fill_train(config, tokenizer, train, validation, rejects, directory, report, excluded, held_out)
    splits = {"train": train}
    if config.validation or config.validation_share:
        splits["validation"] = validation
        if not validation.kept:
            raise DataError(
                f"no validation row is left of {train.read} rows (data.validation_share {config.validation_share}): "
                "raise the share or name a data.validation source"
            )
    if not train.kept:
        shown = "; ".join(f"{reason}, for example {example}" for reason, example in train.examples.items())
        raise DataError(f"no training row is left: {train.report().summary()}{f'; {shown}' if shown else ''}")
    return splits


@contextlib.contextmanager
def _no_cycle_collection() -> Iterator[None]:
    """Rows are many small objects without cycles; looking for cycles among them takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fill_held_out(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    rejects: _Rejects,
    directory: Path | None,
    progress: Progress,
) -> set[str]:
    """Read the validation sources; returns their prompts (held in memory)."""
    prompts: set[str] = set()
    order = _order(config.validation, config, split, rejects, directory, progress)

    def rows() -> Iterator[tuple[Split, KeyedRow]]:
        for row in _unique(order, config, split):
            prompts.add(first_prompt(row.conversation))
            yield split, row

    try:
        _store(rows(), config.replace(pack=False, max_samples=None), tokenizer, [split], rejects, progress)
    finally:
        order.close()
    return prompts


def _fill_train(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    train: Split,
    validation: Split,
    rejects: _Rejects,
    directory: Path | None,
    progress: Progress,
    excluded: set[str],
    held_out: set[str],
) -> None:
    order = _order(config.train, config, train, rejects, directory, progress)

    def rows() -> Iterator[tuple[Split, KeyedRow]]:
        for row in _unique(order, config, train):
            prompt = first_prompt(row.conversation) if held_out or config.validation_share else ""
            if held_out and prompt in held_out:
                train.skipped["held_out_prompt"] += 1
            elif excluded and not excluded.isdisjoint(_user_turns(row.conversation)):
                train.skipped["excluded_prompt"] += 1
            elif config.validation_share and hash_share(prompt, config.seed) < config.validation_share:
                train.read -= 1
                validation.read += 1
                yield validation, row
            else:
                yield train, row

    try:
        _store(rows(), config, tokenizer, [train, validation], rejects, progress)
    finally:
        order.close()


def _order(
    sources: Iterable[SourceConfig],
    config: DataConfig,
    split: Split,
    rejects: _Rejects,
    directory: Path | None,
    progress: Progress,
) -> RowOrder:
    """Read every row of the sources into an order, rejecting the unusable ones."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    order = RowOrder(config.memory_mb << 20, directory, in_order=not config.shuffle)
    position = struct.Struct(">IQ")
    try:
        for number, source in enumerate(sources):
            for raw in read_rows(source):
                split.read += 1
                try:
                    if isinstance(raw.value, RowError):
                        raise raw.value
                    conversation = parse_row(raw.value)
                    flag = raw.value.get("looping")
                    loops = flag if isinstance(flag, bool) else looping(conversation.assistant_text())
                    if loops and config.skip_looping:
                        raise RowError("looping")
                except RowError as error:
                    rejects.add(split, raw.source, raw.index, error)
                else:
                    digest = conversation.digest()
                    key = row_key(digest, config.seed) if config.shuffle else position.pack(number, split.read)
                    order.add(KeyedRow(key, digest, raw.source, raw.index, conversation, loops))
                if split.read % CHECK_AFTER == 0:
                    rejects.check(split, split.read)
                    progress("read", CHECK_AFTER)
        progress("read", split.read % CHECK_AFTER)
    except BaseException:
        order.close()
        raise
    return order


def _unique(order: RowOrder, config: DataConfig, split: Split) -> Iterator[KeyedRow]:
    """Rows in order without exact copies, at most ``max_samples`` of each source."""
    previous = b""
    seen: set[bytes] = set()
    limits = {s.path: s.max_samples for s in (*config.train, *config.validation) if s.max_samples}
    taken: Counter[str] = Counter()
    for row in order:
        if config.deduplicate:
            copy = row.digest == previous if config.shuffle else row.digest in seen
            previous = row.digest
            if not config.shuffle:
                seen.add(row.digest)
            if copy:
                split.skipped["duplicate"] += 1
                continue
        limit = _limit_of(row.source, limits)
        if limit is not None and taken[limit] >= limits[limit]:
            split.skipped["over_limit"] += 1
            continue
        if limit is not None:
            taken[limit] += 1
        yield row


def _limit_of(source: str, limits: dict[str, int]) -> str | None:
    if not limits:
        return None
    path = Path(source)
    for name in limits:
        if source == name or path.is_relative_to(Path(name).expanduser()) or path.match(name):
            return name
    return None


def _user_turns(conversation: Conversation) -> list[str]:
    if conversation.text is not None:
        return []
    return [" ".join(m["content"].split()) for m in conversation.messages if m["role"] == "user"]


def _store(
    rows: Iterator[tuple[Split, KeyedRow]],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    splits: list[Split],
    rejects: _Rejects,
    progress: Progress,
) -> None:
    """Render, tokenize, pack and store rows until ``max_samples`` conversations of the first split are kept."""
    main = splits[0]
    limit = config.max_samples
    left = [limit if limit is not None else -1]

    def samples() -> Iterator[Sample]:
        for split, sample in _samples(rows, config, tokenizer, main, left, rejects, progress):
            if split is main:
                yield sample
            else:
                split.store.add(sample)

    packed = pack_samples(samples(), config.max_length) if config.pack else samples()
    for sample in packed:
        main.store.add(sample)
    for split, _ in rows:
        split.skipped["over_limit"] += 1
    for split in splits:
        rejects.check(split, split.read - split.skipped["over_limit"])
        split.dataset = split.store.finish()


def _samples(
    rows: Iterator[tuple[Split, KeyedRow]],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    main: Split,
    left: list[int],
    rejects: _Rejects,
    progress: Progress,
) -> Iterator[tuple[Split, Sample]]:
    renderer = ChatRenderer(tokenizer, config)

    def until_limit() -> Iterator[tuple[Split, KeyedRow]]:
        while left[0] != 0 and (item := next(rows, None)) is not None:
            yield item

    chunks = render_chunks(renderer, until_limit(), lambda item: item[1].conversation, CHUNK_ROWS, config.num_workers)
    for chunk, results in chunks:
        for (split, row), result in zip(chunk, results, strict=True):
            if left[0] == 0:
                split.skipped["over_limit"] += 1
            elif isinstance(result, RowError):
                rejects.add(split, row.source, row.index, result)
            else:
                left[0] -= split is main
                yield from ((split, sample) for sample in _keep(split, row, result))
        progress("tokenize", len(chunk))


def _keep(split: Split, row: KeyedRow, tokens: list[TokenizedRow]) -> Iterator[Sample]:
    split.kept += 1
    split.by_source[row.source] += 1
    split.looping += row.looping
    for part in tokens:
        split.truncated += part.lost_tokens > 0
        split.lost_tokens += part.lost_tokens
        split.lost_supervised += part.lost_supervised
        split.straddling += part.straddling
        yield part.sample
