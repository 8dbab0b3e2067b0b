"""Prompt files of an evaluation: what the target is asked, turn by turn, and a fingerprint of it.

Rows hold ``turns`` (user messages), ``messages`` or ``conversations`` (answers in them are left out: the target gives
its own), ``prompt``, or ``text`` (continued as it stands, without a chat template).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelopt_spec.arguments import check_paths, whole_number
from modelopt_spec.data.chat import ChatRenderer
from modelopt_spec.data.config import SourceConfig
from modelopt_spec.data.messages import Conversation, RowError, parse_row
from modelopt_spec.data.sources import read_rows
from modelopt_spec.errors import DataError

__all__ = ["Dialogue", "PromptFile", "read_prompt_files"]


@dataclass(frozen=True)
class Dialogue:
    """One prompt: messages that wait for the target, or text to continue."""

    messages: tuple[dict[str, Any], ...] = ()
    """System and user messages (and tool results), in order; the target answers each user message."""
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> list[int]:
        """Index into ``messages`` behind each message that is answered; [0] for text."""
        if self.text is not None:
            return [0]
        ends = [i + 1 for i, message in enumerate(self.messages) if message["role"] in ("user", "tool")]
        # several tool results in a row, or a user message right behind one, are answered together
        return [end for end in ends if end == len(self.messages) or self.messages[end]["role"] == "user"]

    def prompt(self, renderer: ChatRenderer, turn: int, answers: Sequence[str]) -> list[int]:
        """Token ids given to the target in a turn, with its own earlier answers in place."""
        if self.text is not None:
            return list(renderer.tokenizer(self.text)["input_ids"])
        messages: list[dict[str, Any]] = []
        start = 0
        for index, end in enumerate(self.turns[: turn + 1]):
            messages += self.messages[start:end]
            start = end
            if index < turn:
                messages.append({"role": "assistant", "content": answers[index]})
        return renderer.prompt(messages, self.tools, self.template_kwargs)


@dataclass(frozen=True)
class PromptFile:
    """The dialogues of one file."""

    name: str
    """Unique short name in a report: the file's stem, with its directory where two stems are equal."""
    path: str
    dialogues: tuple[Dialogue, ...]
    sha256: str
    """Over the dialogues that are used, so that it changes with ``limit``."""


def _dialogue(row: Any) -> Dialogue:
    conversation = parse_row(row, answers=False)
    if conversation.text is not None:
        return Dialogue(text=conversation.text)
    return Dialogue(_waiting(conversation), None, conversation.tools, conversation.template_kwargs)


def _waiting(conversation: Conversation) -> tuple[dict[str, Any], ...]:
    """Everything that the target does not say itself."""
    return tuple(message for message in conversation.messages if message["role"] != "assistant")


def _digest(dialogues: Sequence[Dialogue]) -> str:
    content = [[list(d.messages), d.text, d.tools, d.template_kwargs] for d in dialogues]
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def read_prompt_files(paths: str | Path | Sequence[str | Path], limit: int | None = None) -> list[PromptFile]:
    """Read prompt files; ``limit`` keeps the first so many prompts of each.

    Raises:
        DataError: no file, no prompt in one, or a row that cannot be asked; names the file and the row.
    """
    listed = check_paths("prompts", paths, "a JSONL file with turns, messages, prompt or text")
    if not listed:
        raise DataError("prompts names no file: give at least one JSONL file with turns, messages, prompt or text")
    if limit is not None:
        whole_number("limit", limit, 1, note=", or unset for all prompts")
    names = [Path(path).name.removesuffix(".gz").removesuffix(Path(path).suffix) for path in listed]
    files = []
    for path, name in zip(listed, names, strict=True):
        dialogues: list[Dialogue] = []
        for row in read_rows(SourceConfig(path=str(path))):
            if limit is not None and len(dialogues) >= limit:
                break
            try:
                if isinstance(row.value, RowError):
                    raise row.value
                dialogues.append(_dialogue(row.value))
            except RowError as error:
                raise DataError(f"prompt file {row.place}: {error}") from None
            if not dialogues[-1].turns:
                raise DataError(f"prompt file {row.place}: no user message in it")
        if not dialogues:
            raise DataError(f"prompt file {str(path)!r} holds no prompt")
        unique = name if names.count(name) == 1 else f"{Path(path).parent.name}/{name}"
        files.append(PromptFile(unique, str(path), tuple(dialogues), _digest(dialogues)))
    return files
