"""Conversations -> token rows with a mask over the tokens that the assistant wrote.

The supervised tokens are those that the target writes itself when it is served: the answer and the token that ends
its turn. Prompts, headers and the line break after a turn are never supervised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from modelopt_spec.data.config import DataConfig
from modelopt_spec.data.messages import Conversation, RowError, parse_row
from modelopt_spec.data.template import ChatTemplate, RenderedRow
from modelopt_spec.data.tokens import EncodedRow, RowTokenizer
from modelopt_spec.errors import DataError
from modelopt_spec.text_files import read_text

__all__ = ["ChatRenderer", "CutRow", "TokenRow", "render_prompt", "render_row"]

Made = TypeVar("Made")


@dataclass(frozen=True)
class TokenRow:
    """Tokens of one row and which of them are supervised; both of the row's length S."""

    input_ids: list[int]
    loss_mask: list[bool]
    lost_tokens: int = 0
    """Tokens that the length limit cut off."""
    lost_supervised: int = 0
    """Supervised ones among them."""
    straddling: int = 0
    """Tokens that begin in a prompt and end in an answer; they are not supervised."""


@dataclass(frozen=True)
class CutRow:
    """A row after the length limit: ids and ranges of supervised tokens, and what was lost as in :class:`TokenRow`."""

    ids: list[int]
    ranges: list[tuple[int, int]]
    lost_tokens: int
    lost_supervised: int
    straddling: int


@dataclass(frozen=True)
class _Rendered:
    """The rows of one conversation before they are tokenized, or why there are none."""

    rows: list[RenderedRow]
    special_tokens: bool = False
    error: RowError | None = None


class ChatRenderer:
    """Turns raw rows into token rows with one tokenizer and one :class:`DataConfig`.

    The template is looked up when the first conversation arrives, so rows of plain text need none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig | None = None) -> None:
        self.tokenizer = tokenizer
        self.config = config or DataConfig()
        self.encoder = RowTokenizer(tokenizer)
        self._template: ChatTemplate | None = None

    @property
    def template(self) -> ChatTemplate:
        """The chat template in use."""
        if self._template is None:
            config = self.config
            self._template = ChatTemplate(
                self.tokenizer, template_text(config.chat_template), config.template_kwargs, config.date
            )
        return self._template

    def render(self, conversation: Conversation) -> list[RenderedRow]:
        """Text and supervised character spans; several rows where the template rewrites earlier turns.

        Raises:
            RowError: the conversation cannot be rendered faithfully.
        """
        if conversation.text is not None:
            return [RenderedRow(conversation.text, ((0, len(conversation.text)),))]
        messages = place_system(conversation.messages, self.config.system_role)
        if messages is not conversation.messages:
            conversation = replace(conversation, messages=messages)
        return self.template.rows(conversation, self.config.supervise, self.config.rewrites)

    def __call__(self, rows: Sequence[Mapping[str, Any] | Conversation]) -> list[list[TokenRow] | RowError]:
        """Token rows of each raw row, or why it has none. Templates run once a row, the tokenizer once a batch."""
        return self.tokenize_all(self.render_all(rows))

    def render_all(self, rows: Sequence[Mapping[str, Any] | Conversation]) -> list[_Rendered]:
        """Parse and render many rows; errors stand in the place of their row."""
        result: list[_Rendered] = []
        for row in rows:
            try:
                conversation = row if isinstance(row, Conversation) else parse_row(row)
                special = conversation.text is not None and not self._has_bos(conversation.text)
                result.append(_Rendered(self.render(conversation), special))
            except RowError as error:
                result.append(_Rendered([], error=error))
        return result

    def tokenize_all(self, rendered: Sequence[_Rendered]) -> list[list[TokenRow] | RowError]:
        """Tokenize what :meth:`render_all` gave; a conversation keeps those of its rows that can be used."""
        return self.tokenize_as(_token_row, rendered)

    def tokenize_as(self, make: Callable[[CutRow], Made], rendered: Sequence[_Rendered]) -> list[list[Made] | RowError]:
        """:meth:`tokenize_all` with rows in another form.

        A row that is too long or keeps too little supervision is left out (reasons too_long, truncated_away,
        too_few_supervised); a conversation without any row comes back as the error of its first.
        """
        tokens: dict[bool, list[EncodedRow]] = {}
        for special in (False, True):
            batch = [row for item in rendered if item.special_tokens is special for row in item.rows]
            tokens[special] = self.encoder.encode(batch, special_tokens=special)[::-1] if batch else []
        result: list[list[Made] | RowError] = []
        for item in rendered:
            good: list[Made] = []
            error = item.error
            for _ in item.rows:
                row = self._cut(tokens[item.special_tokens].pop())
                if isinstance(row, RowError):
                    error = error or row
                else:
                    good.append(make(row))
            if not good and error is None:
                error = RowError("no_assistant", "nothing was rendered")
            result.append(good if good else cast(RowError, error))
        return result

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of ``messages`` with the generation prompt behind them: what the target is given to answer.

        Raises:
            DataError: the messages or the template do not allow it.
        """
        try:
            placed = place_system([dict(m) for m in messages], self.config.system_role)
            text, _ = self.template.render(
                placed, tools=tools, template_kwargs=template_kwargs, add_generation_prompt=True
            )
        except RowError as error:
            raise DataError(f"prompt cannot be rendered: {error}") from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _has_bos(self, text: str) -> bool:
        bos = self.tokenizer.bos_token
        return bool(bos) and text.startswith(str(bos))

    def _cut(self, row: EncodedRow) -> CutRow | RowError:
        """Apply the length limit; a row keeps enough supervision or is an error."""
        limit = self.config.max_length
        total = sum(last - first for first, last in row.ranges)
        lost = len(row.ids) - limit
        if lost <= 0:
            if total < self.config.min_supervised:
                return RowError("too_few_supervised", f"{total} supervised tokens")
            return CutRow(row.ids, row.ranges, 0, 0, row.straddling)
        if self.config.overlong == "skip":
            return RowError("too_long", f"{len(row.ids)} tokens, max_length is {limit}")
        ranges = [(first, min(last, limit)) for first, last in row.ranges if first < limit]
        kept = sum(last - first for first, last in ranges)
        if kept < self.config.min_supervised:
            reason = "truncated_away" if total >= self.config.min_supervised else "too_few_supervised"
            return RowError(reason, f"{kept} supervised tokens are left of {total}")
        return CutRow(row.ids[:limit], ranges, lost, total - kept, row.straddling)


def _token_row(row: CutRow) -> TokenRow:
    mask = [False] * len(row.ids)
    for first, last in row.ranges:
        mask[first:last] = [True] * (last - first)
    return TokenRow(row.ids, mask, row.lost_tokens, row.lost_supervised, row.straddling)


def place_system(messages: list[dict[str, Any]], system_role: str) -> list[dict[str, Any]]:
    """Messages with the leading system ones kept, merged into the first user message or dropped."""
    if system_role == "keep" or not messages or messages[0]["role"] not in ("system", "developer"):
        return messages
    count = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    rest = [dict(message) for message in messages[count:]]
    if system_role == "merge" and rest:
        parts = [message["content"] for message in messages[:count]] + [rest[0]["content"]]
        rest[0]["content"] = "\n\n".join(parts)
    return rest


def template_text(value: str | None) -> str | None:
    """Jinja text of the setting ``chat_template``: the text itself, or the contents of the file that it names."""
    if value is None or "{" in value or "\n" in value:
        return value
    path = Path(value)
    if not path.is_file():
        raise DataError(f"data.chat_template is {value!r}: no such file, and not Jinja text either")
    return read_text(path, "a file of Jinja text (data.chat_template)")


def render_row(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, config: DataConfig | None = None
) -> list[TokenRow]:
    """Token rows of one raw row: one, or several where the template rewrites earlier turns.

    Raises:
        DataError: the row cannot be used; the message says why.
    """
    result = ChatRenderer(tokenizer, config)([row])[0]
    if isinstance(result, RowError):
        raise DataError(f"row cannot be used: {result}")
    return result


def render_prompt(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, config: DataConfig | None = None
) -> list[int]:
    """Token ids of ``messages`` with the generation prompt: what a server would give to the target."""
    return ChatRenderer(tokenizer, config).prompt(messages)
