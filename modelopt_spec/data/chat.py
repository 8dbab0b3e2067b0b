"""Conversations -> token rows with a mask over the tokens that the assistant wrote.

The supervised tokens are those that the target writes itself when it is served: the answer and the token that ends
its turn. Prompts, headers and the line break after a turn are never supervised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from modelopt_spec.data.config import DataConfig
from modelopt_spec.data.messages import Conversation, RowError, parse_row
from modelopt_spec.data.template import ChatTemplate, RenderedRow, Span
from modelopt_spec.errors import DataError

__all__ = ["ChatRenderer", "TokenRow", "render_prompt", "render_row"]


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

    def tokenize(self, rows: Sequence[RenderedRow], *, special_tokens: bool = False) -> list[TokenRow | RowError]:
        """Tokenize rendered rows, batched, and cut them to the length limit.

        ``special_tokens`` adds the tokenizer's own (templates print theirs; plain text has none). A row that is too
        long or keeps too little supervision comes back as a :class:`RowError` (too_long, truncated_away,
        too_few_supervised).
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None) if self.tokenizer.is_fast else None
        if backend is None:
            return [self._finish(*self._slow(row, special_tokens)) for row in rows]
        backend.no_truncation()
        backend.no_padding()
        encodings = backend.encode_batch([row.text for row in rows], add_special_tokens=special_tokens)
        return [self._finish(*_mask(encoding, row)) for encoding, row in zip(encodings, rows, strict=True)]

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
        tokens: dict[bool, list[TokenRow | RowError]] = {}
        for special in (False, True):
            batch = [row for item in rendered if item.special_tokens is special for row in item.rows]
            tokens[special] = self.tokenize(batch, special_tokens=special)[::-1] if batch else []
        result: list[list[TokenRow] | RowError] = []
        for item in rendered:
            parts = [tokens[item.special_tokens].pop() for _ in item.rows]
            errors = [part for part in parts if isinstance(part, RowError)]
            good = [part for part in parts if isinstance(part, TokenRow)]
            result.append(good or item.error or errors[0])
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

    def _finish(self, ids: list[int], mask: list[bool], straddling: int) -> TokenRow | RowError:
        limit, total = self.config.max_length, sum(mask)
        lost = max(0, len(ids) - limit)
        if lost and self.config.overlong == "skip":
            return RowError("too_long", f"{len(ids)} tokens, max_length is {limit}")
        if lost:
            ids, mask = ids[:limit], mask[:limit]
        kept = sum(mask) if lost else total
        if kept < self.config.min_supervised:
            reason = "truncated_away" if total >= self.config.min_supervised else "too_few_supervised"
            return RowError(reason, f"{kept} supervised tokens are left of {total}")
        return TokenRow(ids, mask, lost, total - kept, straddling)

    def _slow(self, row: RenderedRow, special_tokens: bool) -> tuple[list[int], list[bool], int]:
        """Without offsets: tokens up to each end of a span must be a prefix of the row's tokens."""
        ids = list(self.tokenizer(row.text, add_special_tokens=special_tokens)["input_ids"])
        if row.spans == ((0, len(row.text)),):
            return ids, [True] * len(ids), 0
        mask = [False] * len(ids)
        for start, end in row.spans:
            edges = []
            for position in (start, end):
                head = list(self.tokenizer(row.text[:position], add_special_tokens=special_tokens)["input_ids"])
                if ids[: len(head)] != head:
                    raise DataError(
                        f"{type(self.tokenizer).__name__} gives no offsets and merges tokens across the start of an "
                        "answer, so its supervised tokens cannot be told apart: use a fast tokenizer"
                    )
                edges.append(len(head))
            mask[edges[0] : edges[1]] = [True] * (edges[1] - edges[0])
        return ids, mask, 0


def _mask(encoding: Any, row: RenderedRow) -> tuple[list[int], list[bool], int]:
    """Ids, supervision and straddling tokens of one encoding: a token counts where its first character stands."""
    ids: list[int] = encoding.ids
    count = len(ids)
    if len(row.spans) == 1 and row.spans[0] == (0, len(row.text)):
        return ids, [True] * count, 0
    mask = [False] * count
    straddling = 0
    for span in row.spans:
        first, last, cut = _token_range(encoding, span, len(row.text), count)
        straddling += cut
        if last > first:
            mask[first:last] = [True] * (last - first)
    return ids, mask, straddling


def _token_range(encoding: Any, span: Span, length: int, count: int) -> tuple[int, int, int]:
    """Tokens [first, last) whose first character lies in the span, and 1 if one begins before it and reaches in."""
    edges, cut = [], 0
    for position in span:
        token = None
        at = position
        while at < length and (token := encoding.char_to_token(at)) is None:
            at += 1
        if token is None:
            edges.append(count)
        elif encoding.token_to_chars(token)[0] < position:
            edges.append(token + 1)
            cut += position == span[0]
        else:
            edges.append(token)
    return edges[0], edges[1], cut


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
    return path.read_text(encoding="utf-8")


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
