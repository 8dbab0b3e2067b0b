"""Chat templates: where in a rendered conversation the assistant speaks, whatever the template does.

A *span* is a half-open character range of the rendered text that the model writes itself when it is served: the
answer and the token that ends its turn, without the header before it and the line break after it.

With generation tags (``{% generation %}``) the template says where that is. Without them each turn is found by
rendering prefixes: the text of ``messages[:i]`` with the generation prompt is what the model is given, what
``messages[:i+1]`` adds is what it writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from modelopt_spec.data.config import parse_date
from modelopt_spec.data.messages import Conversation, RowError, join_thinking, split_thinking
from modelopt_spec.errors import DataError

__all__ = ["ChatTemplate", "RenderedRow", "Span"]

Span = tuple[int, int]
Message = dict[str, Any]
_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "ProbeAnswer"
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True)
class RenderedRow:
    """Rendered text and the spans in it that are supervised, ascending."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Turn:
    """One assistant turn as it was generated: the text up to its end, its spans and what the template adds behind."""

    index: int
    text: str
    spans: tuple[Span, ...]

    @property
    def end(self) -> int:
        return self.spans[-1][1]


class ChatTemplate:
    """A tokenizer's chat template with the variables of a run.

    Args:
        tokenizer: gives the template, its special tokens and their text.
        chat_template: Jinja text that replaces the tokenizer's own.
        template_kwargs: variables passed to every rendering; a row's own win.
        date: YYYY-MM-DD that ``strftime_now`` prints, so that the same data gives the same tokens on another day.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        date: str | None = None,
    ) -> None:
        try:
            self.source: str = tokenizer.get_chat_template(chat_template)
            self.tools_source: str = tokenizer.get_chat_template(chat_template, tools=[{}])
        except ValueError as error:
            raise DataError(
                "the tokenizer has no chat template, so rows with messages cannot be rendered: set data.chat_template "
                f"to a Jinja file or use rows of plain `text` ({str(error).split('!')[0]})"
            ) from None
        self.kwargs: dict[str, Any] = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        if date is not None:
            day = parse_date(date)
            self.kwargs["strftime_now"] = day.strftime
        specials = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials |= {str(token) for token in (tokenizer.eos_token,) if token}
        self._specials = tuple(sorted(specials, key=len, reverse=True))
        self._special = re.compile("|".join(re.escape(s) for s in self._specials) or r"(?!)")
        self.turn_end, self.adds_generation_prompt = self._probe()

    # ---- rendering ---------------------------------------------------------------------------------------------------

    def has_generation_tags(self, tools: Any = None) -> bool:
        """Whether the template marks the assistant's words itself."""
        return bool(_TAGS.search(self.tools_source if tools else self.source))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = False,
        tagged: bool = False,
    ) -> tuple[str, list[Span]]:
        """Render one conversation: its text and, if ``tagged``, the spans inside generation tags.

        Raises:
            RowError: the template refuses the conversation (reason template_error).
        """
        kwargs = {**self.kwargs, **template_kwargs} if template_kwargs else self.kwargs
        try:
            # annotated wrongly upstream: it returns lists of texts and of spans
            texts, spans = cast(Any, render_jinja_template)(
                [messages],
                tools=tools,
                chat_template=self.tools_source if tools else self.source,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=tagged,
                **kwargs,
            )
        except _RENDER_ERRORS as error:
            texts_of_arguments = _arguments_as_text(messages)
            if texts_of_arguments is None:
                raise RowError("template_error", str(error) or type(error).__name__) from None
            return self.render(
                texts_of_arguments,
                tools=tools,
                template_kwargs=template_kwargs,
                add_generation_prompt=add_generation_prompt,
                tagged=tagged,
            )
        return texts[0], list(spans[0]) if tagged else []

    def _probe(self) -> tuple[str, bool]:
        """The text that ends an assistant turn ("" if the template has none), and whether generation prompts exist."""
        user: Message = {"role": "user", "content": "ProbeQuestion"}
        answer: Message = {"role": "assistant", "content": _PROBE}
        try:
            text = self.render([user, answer])[0]
            bare = self.render([user])[0]
            prompt = self.render([user], add_generation_prompt=True)[0]
        except RowError as error:
            raise DataError(
                f"data.chat_template: the template cannot render a user and an assistant message ({error.detail}): "
                "fix it or set data.template_kwargs to the variables that it needs"
            ) from None
        if _PROBE not in text:
            raise DataError(
                "data.chat_template: the template does not print the assistant's content; it cannot be taught"
            )
        tail = text[text.rindex(_PROBE) + len(_PROBE) :]
        match = self._special.search(tail)
        return (tail[: match.end()] if match else tail.rstrip()), prompt != bare

    # ---- spans -------------------------------------------------------------------------------------------------------

    def rows(
        self,
        conversation: Conversation,
        supervise: Literal["all", "last"] = "all",
        rewrites: Literal["split", "last", "refuse"] = "split",
    ) -> list[RenderedRow]:
        """Render a conversation to rows in which every taught turn stands exactly as it was generated.

        One row, unless the template rewrites earlier turns: then the turns that agree share a row (``rewrites`` says
        whether the others get rows of their own, are left out, or make the conversation unusable).

        Raises:
            RowError: reasons template_error, template_rewrites, template_spans, thinking_lost, content_lost.
        """
        taught = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if supervise == "last":
            taught = taught[-1:]
        last = self._turn(conversation, taught[-1])
        self._check_content(conversation.messages[: taught[-1] + 1], last)
        rows: list[RenderedRow] = []
        head, spans = last, list(last.spans)
        if conversation.unfinished and taught[-1] == len(conversation.messages) - 1:
            spans[-1] = self._without_turn_end(last.text, spans[-1])
        for index in reversed(taught[:-1]):
            turn = self._turn(conversation, index)
            if head.text.startswith(turn.text[: turn.end]):
                spans = [*turn.spans, *spans]
                continue
            if rewrites == "refuse":
                raise RowError("template_rewrites", f"the template renders turn {index} differently later on")
            if rewrites == "last":
                break
            rows.append(RenderedRow(head.text, tuple(spans)))
            head, spans = turn, list(turn.spans)
        rows.append(RenderedRow(head.text, tuple(spans)))
        return rows[::-1]

    def _turn(self, conversation: Conversation, index: int) -> _Turn:
        messages = self._known_names(conversation.messages[: index + 1])
        tagged = self.has_generation_tags(conversation.tools)
        variables: dict[str, Any] = {
            "tools": conversation.tools,
            "template_kwargs": conversation.template_kwargs,
        }
        text, spans = self.render(messages, tagged=tagged, **variables)
        if tagged:
            first = all(message["role"] != "assistant" for message in messages[:index])
            before = "" if first else self.render(messages[:index], **variables)[0]
            spans = [self._with_turn_end(text, span) for span in spans if span[0] >= len(before)]
            if not text.startswith(before) or not spans:
                raise RowError("template_spans", f"the generation tags of the template do not mark turn {index}")
            turn = _Turn(index, text, tuple(spans))
        else:
            prompt = self.render(messages[:index], add_generation_prompt=True, **variables)[0]
            turn = self._untagged_turn(messages, index, prompt, text)
        self._check_thinking(conversation.messages[index], turn)
        return turn

    def _untagged_turn(self, messages: list[Message], index: int, prompt: str, text: str) -> _Turn:
        message = messages[index]
        thinking, answer = _thinking_and_answer(message)
        if text.startswith(prompt):
            start = len(prompt)
        elif text.startswith(prompt.rstrip()):
            start = len(prompt.rstrip())
        elif thinking and prompt.rstrip().endswith("<think>"):
            # the template opens the thinking part for the model and never prints it again: rebuild what was generated
            written = join_thinking(thinking, answer)[len("<think>\n") :]
            text = prompt.rstrip() + "\n" + written + self.turn_end
            return _Turn(index, text, ((len(prompt.rstrip()) + 1, len(text)),))
        else:
            raise RowError(
                "template_spans",
                f"what the template prints for turn {index} does not start with its generation prompt "
                f"(...{prompt[-40:]!r}); set data.template_kwargs (e.g. enable_thinking) to the mode of the data",
            )
        if not self.adds_generation_prompt:
            found = text.find(answer.strip(), start)
            header = text[start:found].rstrip() if answer.strip() and found >= 0 else ""
            start += len(header)
        end = self._end_of_turn(text, start)
        if end <= start:
            raise RowError("template_spans", f"the template prints nothing for assistant turn {index}")
        return _Turn(index, text, ((start, end),))

    def _end_of_turn(self, text: str, start: int) -> int:
        """Where the turn that starts at ``start`` and ends the text has its last supervised character."""
        found = text.rfind(self.turn_end, start) if self.turn_end else -1
        if found >= 0 and not text[found + len(self.turn_end) :].strip():
            return found + len(self.turn_end)
        trailing = self._trailing_start(text, start)
        if found >= 0 and found + len(self.turn_end) >= trailing:
            return found + len(self.turn_end)
        # another token ends this turn (e.g. after a tool call), or none does
        special = self._special.search(text, trailing)
        return special.end() if special else start + len(text[start:].rstrip())

    def _trailing_start(self, text: str, start: int) -> int:
        """Where the run of special tokens and white space that ends the text begins."""
        end = len(text)
        while end > start:
            stripped = start + len(text[start:end].rstrip())
            token = next((s for s in self._specials if text.endswith(s, start, stripped)), None)
            if token is None:
                return stripped
            end = stripped - len(token)
        return start

    def _with_turn_end(self, text: str, span: Span) -> Span:
        """A tagged span, extended by the token that ends the turn, without white space behind that token."""
        start, end = span
        if self.turn_end:
            if text.startswith(self.turn_end, end):
                return start, end + len(self.turn_end)
            inner = text[start:end].rstrip()
            if inner.endswith(self.turn_end.strip()):
                return start, start + len(inner)
        special = self._special.match(text, end) if self.turn_end else None
        return (start, special.end()) if special else (start, end)

    def _without_turn_end(self, text: str, span: Span) -> Span:
        """The span of an answer that was cut off: the template ends its turn, the model did not."""
        start, end = span
        if self.turn_end and text.endswith(self.turn_end, start, end):
            return start, end - len(self.turn_end)
        return span

    # ---- what must not get lost --------------------------------------------------------------------------------------

    def _known_names(self, messages: list[Message]) -> list[Message]:
        """Pass thinking under the name that the template knows, or inside of the content if it knows none."""
        if not any("reasoning_content" in message for message in messages):
            return messages
        names = [n for n in ("reasoning_content", "reasoning", "thinking") if re.search(rf"\b{n}\b", self.source)]
        result = []
        for message in messages:
            if "reasoning_content" in message:
                message = dict(message)
                thinking = message.pop("reasoning_content")
                if names:
                    message[names[0]] = thinking
                else:
                    message["content"] = join_thinking(thinking, message["content"])
            result.append(message)
        return result

    def _check_thinking(self, message: Message, turn: _Turn) -> None:
        thinking, _ = _thinking_and_answer(message)
        if thinking and thinking not in turn.text[turn.spans[0][0] : turn.end]:
            raise RowError(
                "thinking_lost", "the template does not print the thinking part of the turn that it belongs to"
            )

    def _check_content(self, messages: Iterable[Message], turn: _Turn) -> None:
        for message in messages:
            answer = message["content"]
            if "</think>" in answer:
                answer = split_thinking(answer)[1]
            if answer.strip() not in turn.text:
                raise RowError("content_lost", f"the template does not print a {message['role']} message as it is")
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in turn.text:
                    raise RowError("content_lost", "the template does not print the tool calls of a message")


def _thinking_and_answer(message: Message) -> tuple[str, str]:
    for key in ("reasoning_content", "reasoning", "thinking"):
        if message.get(key):
            return message[key].strip(), message["content"]
    return split_thinking(message["content"]) if "</think>" in message["content"] else ("", message["content"])


def _arguments_as_text(messages: Sequence[Message]) -> list[Message] | None:
    """The same messages with tool arguments as JSON text, which some templates want; None if that changes nothing."""
    import json

    changed, result = False, []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                function = call["function"]
                if not isinstance(function["arguments"], str):
                    changed = True
                    function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
                calls.append({**call, "function": function})
            message = {**message, "tool_calls": calls}
        result.append(message)
    return result if changed else None
