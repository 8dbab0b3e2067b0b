"""Answers written by the target itself: what a drafter should learn is how its target speaks, not how others do.

A run can be killed at any time and started again: rows that are in the output are done, all others are asked for
again, and a row's identity depends on its prompt alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from modelopt_spec.data.answering import Dialogue, Server
from modelopt_spec.data.config import RegenerateConfig
from modelopt_spec.data.ledger import Ledger, check_begun
from modelopt_spec.data.looping import looping
from modelopt_spec.data.messages import Conversation, RowError, parse_row
from modelopt_spec.data.ordering import KeyedRow, RowOrder, hash_share, row_key
from modelopt_spec.data.sources import read_prompts, read_rows
from modelopt_spec.errors import DataError
from modelopt_spec.progress import progress
from modelopt_spec.versions import versions

__all__ = ["Answerer", "RegenerateReport", "regenerate"]

CHECK_AFTER = 100
"""Answers after which a share of failures above the limit ends the run."""


class Answerer(Protocol):
    """What lets the target speak; :class:`Server` and :class:`LocalModel` do."""

    def describe(self) -> dict[str, Any]:
        """Facts for the record."""
        ...

    def answers(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
        """Finished dialogues, in any order."""
        ...


@dataclass(frozen=True)
class RegenerateReport:
    """What a run did."""

    prompts: int
    """Distinct prompts that were asked for, the finished ones of earlier runs included."""
    resumed: int
    """Rows that earlier runs had finished."""
    written: int
    failed: dict[str, int] = field(default_factory=dict)
    """Prompts without an answer, by reason; another run asks them again."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows of the sources that give no prompt, by reason."""
    looping: int = 0
    cut: int = 0
    """Answers that ended at max_tokens."""
    tokens: int = 0


def regenerate(config: RegenerateConfig, answerer: Answerer | None = None, *, quiet: bool = False) -> RegenerateReport:
    """Ask the target every prompt and append its answers to ``config.output``.

    Args:
        config: prompts, output and sampling; ``config.server`` names the server.
        answerer: instead of a server, for example a :class:`~modelopt_spec.data.answering.LocalModel`.
        quiet: no progress bar.

    Returns:
        Counts of this run.

    Raises:
        DataError: an output that was begun with other settings, a server that stays away or refuses, or more failures
            than ``max_failed_share``. Everything written so far stays, and the next run goes on from there.
    """
    check_begun(config.output)
    if answerer is None:
        if config.server is None:
            raise DataError("regenerate needs a server section, or a model in this process as answerer")
        answerer = Server(config.server, config.sampling)
    facts = answerer.describe()
    counts: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    with Ledger(config.output, _settings(config)) as ledger:
        resumed = len(ledger.ids)
        about = {"answerer": facts, "versions": versions()}
        ledger.describe(**about)
        order = _ordered_prompts(config, skipped)
        total = config.max_samples * config.samples_per_prompt if config.max_samples else None
        try:
            with progress("regenerate", total, quiet=quiet) as advance:
                dialogues = _dialogues(config, order, ledger, counts, skipped)
                for dialogue in answerer.answers(dialogues):
                    if dialogue.error:
                        failed[dialogue.error.partition(":")[0]] += 1
                        _check_failures(config, failed, counts, dialogue)
                    else:
                        row = _row(dialogue)
                        ledger.append(row)
                        counts["written"] += 1
                        counts["looping"] += row["looping"]
                        counts["cut"] += row["finish_reason"] == "length"
                        counts["tokens"] += dialogue.tokens
                    advance(1)
        finally:
            order.close()
        report = RegenerateReport(
            prompts=counts["prompts"],
            resumed=resumed,
            written=counts["written"],
            failed=dict(failed),
            skipped=dict(skipped),
            looping=counts["looping"],
            cut=counts["cut"],
            tokens=counts["tokens"],
        )
        ledger.describe(**about, rows=len(ledger.ids), complete=not failed)
    if not counts["prompts"]:
        raise DataError(f"no prompt in the sources: {dict(skipped)}")
    return report


def _settings(config: RegenerateConfig) -> dict[str, Any]:
    """What decides the content of rows; where the server runs and how often it is asked does not."""
    values = config.model_dump(mode="json")
    kept = {name: values[name] for name in ("sampling", "turns", "samples_per_prompt", "thinking_share", "seed")}
    server = values.get("server")
    if server:
        kept |= {"model": server["model"], "extra_body": server["extra_body"]}
    return kept


def _ordered_prompts(config: RegenerateConfig, skipped: Counter[str]) -> RowOrder:
    """Prompts of all sources in an order that depends on the seed and the prompts alone."""
    excluded = {
        " ".join(turn.split()) for path in config.exclude_prompts for turns in read_prompts(path) for turn in turns
    }
    order = RowOrder(config.memory_mb << 20)
    for source in config.prompts:
        for raw in read_rows(source):
            try:
                if isinstance(raw.value, RowError):
                    raise raw.value
                prompt = _prompt(raw.value, config.turns)
                users = (message["content"] for message in prompt.messages if message["role"] == "user")
                if excluded and any(" ".join(text.split()) in excluded for text in users):
                    raise RowError("excluded_prompt")
            except RowError as error:
                skipped[error.reason] += 1
                continue
            digest = prompt.digest()
            order.add(KeyedRow(row_key(digest, config.seed), digest, raw.source, raw.index, prompt, False))
    return order


def _prompt(row: Mapping[str, Any], turns: str) -> Conversation:
    """The messages that stay; ``answer_next`` marks those that the target speaks after.

    Conversations with tools keep their history, whatever ``turns`` says: results belong to the calls that were made.
    """
    conversation = parse_row(row, answers=False)
    messages = conversation.messages
    keep_history = turns == "last" or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if conversation.text is not None or not messages or messages[-1]["role"] not in ("user", "tool"):
        raise RowError("no_prompt", "nothing that the target could answer")
    last = len(messages) - 1
    if not keep_history:
        messages = [message for message in messages if message["role"] != "assistant"]
        last = len(messages) - 1
    marked = [
        {**message, "answer_next": True} if i == last or (not keep_history and message["role"] == "user") else message
        for i, message in enumerate(messages)
    ]
    return replace(conversation, messages=marked, unfinished=False)


def _dialogues(
    config: RegenerateConfig, order: RowOrder, ledger: Ledger, counts: Counter[str], skipped: Counter[str]
) -> Iterator[Dialogue]:
    """The dialogues that are still to be had."""
    previous = b""
    prompts = 0
    for row in order:
        if row.digest == previous:
            skipped["duplicate"] += 1
            continue
        previous = row.digest
        if config.max_samples is not None and prompts >= config.max_samples:
            return
        prompts += 1
        for sample in range(config.samples_per_prompt):
            counts["prompts"] += 1
            name = hashlib.blake2b(row.digest + bytes([sample % 256, sample // 256]), digest_size=12).hexdigest()
            if name in ledger.ids:
                continue
            kwargs = dict(row.conversation.template_kwargs)
            if config.thinking_share is not None:
                kwargs["enable_thinking"] = hash_share(name, config.seed) < config.thinking_share
            yield Dialogue(name, tuple(row.conversation.messages), (), kwargs, row.conversation.tools)


def _row(dialogue: Dialogue) -> dict[str, Any]:
    said = "\n".join(message["content"] for message in dialogue.messages if message["role"] == "assistant")
    row: dict[str, Any] = {
        "id": dialogue.id,
        "messages": list(dialogue.messages),
        "finish_reason": dialogue.finish_reason,
        "completion_tokens": dialogue.tokens,
        "looping": looping(said),
    }
    if dialogue.tools:
        row["tools"] = dialogue.tools
    if dialogue.template_kwargs:
        row["chat_template_kwargs"] = dialogue.template_kwargs
    return row


def _check_failures(config: RegenerateConfig, failed: Counter[str], counts: Counter[str], last: Dialogue) -> None:
    total, bad = counts["written"] + failed.total(), failed.total()
    if total >= CHECK_AFTER and bad / total > config.max_failed_share:
        raise DataError(
            f"{bad} of {total} prompts failed, more than max_failed_share {config.max_failed_share}: {dict(failed)}; "
            f"the last one with {last.error!r}"
        )
