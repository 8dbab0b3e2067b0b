"""Raw rows of many shapes -> one :class:`Conversation`, or a :class:`RowError` that says why not.

Shapes: ``messages`` or ``conversations`` (OpenAI ``role``/``content`` or ShareGPT ``from``/``value``, content as text
or as a list of parts, ``tool_calls``, ``reasoning_content``/``reasoning``/``thinking``), ``prompt`` with ``response``
or ``completion`` (a prompt may itself be a list of messages), and plain ``text``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

__all__ = [
    "Conversation",
    "RowError",
    "first_prompt",
    "join_thinking",
    "parse_row",
    "split_thinking",
]

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_call": "function_call",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_THINKING_PARTS = frozenset({"thinking", "reasoning"})


class RowError(ValueError):
    """One row that cannot be used: a short countable ``reason`` and the detail behind it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str]]:
        return RowError, (self.reason, self.detail)


@dataclass(frozen=True)
class Conversation:
    """A row in one shape: chat ``messages``, or ``text`` that is taught as it stands."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """role (system, developer, user, assistant, tool), content, and where given reasoning_content, tool_calls, name."""
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Template variables of this row (e.g. enable_thinking); they win over the configuration's."""
    unfinished: bool = False
    """The last answer was cut by a length limit (finish_reason "length"): the model never ended that turn."""

    def digest(self) -> bytes:
        """16 bytes that are equal exactly when everything that is rendered is equal."""
        if self.text is not None:
            return blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=16, person=b"text").digest()
        plain: list[str] = []
        for message in self.messages:
            if len(message) == 2:
                plain += (message["role"], message["content"])
            else:
                plain.append(json.dumps(message, sort_keys=True, ensure_ascii=False))
        if self.tools or self.template_kwargs or self.unfinished:
            rest = [self.tools, self.template_kwargs, self.unfinished]
            plain.append(json.dumps(rest, sort_keys=True, ensure_ascii=False))
        lengths = ",".join(str(len(part)) for part in plain)
        joined = lengths + "\x00" + "\x00".join(plain)
        return blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16, person=b"chat").digest()

    def assistant_text(self) -> str:
        """All that the assistant says, one turn a line."""
        if self.text is not None:
            return self.text
        return "\n".join(m["content"] for m in self.messages if m["role"] == "assistant")


def first_prompt(conversation: Conversation) -> str:
    """What a conversation is about: its first user message, white space collapsed. Splits are disjoint by it."""
    if conversation.text is not None:
        return " ".join(conversation.text.split())
    for message in conversation.messages:
        if message["role"] == "user":
            return " ".join(message["content"].split())
    return ""


def split_thinking(content: str) -> tuple[str, str]:
    """``"<think>a</think>b"`` -> ``("a", "b")``, both stripped; ``("", content)`` without the tags."""
    head, mark, tail = content.partition("</think>")
    if not mark:
        return "", content
    return head.rpartition("<think>")[2].strip(), tail.strip()


def join_thinking(reasoning: str, content: str) -> str:
    """The inverse of :func:`split_thinking`, in the form that thinking models write."""
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content.lstrip()}"


def parse_row(row: Mapping[str, Any], answers: bool = True) -> Conversation:
    """Bring a raw row into one shape.

    Args:
        row: a mapping with messages, conversations, prompt, text or turns.
        answers: rows need an assistant message; without, rows that are only prompts are fine (several user messages in
            a row are turns of a dialogue that is still to be had).

    Raises:
        RowError: with one of the reasons not_an_object, unknown_shape, prompts_only, empty, role, role_order,
            no_assistant, content, multimodal, tool_calls, tools, template_kwargs.
    """
    if not isinstance(row, Mapping):
        raise RowError("not_an_object", f"a row is an object, not {type(row).__name__}")
    raw = _raw_messages(row, answers)
    if raw is None:
        if row.get("text") is None:
            raise RowError("unknown_shape", f"no messages, conversations, prompt or text among {sorted(map(str, row))}")
        if not isinstance(row["text"], str):
            raise RowError("content", f"text is text, not {type(row['text']).__name__}")
        if not row["text"].strip():
            raise RowError("empty", "text is empty")
        return Conversation(text=row["text"])
    if isinstance(raw, str) or not isinstance(raw, Sequence):
        raise RowError("unknown_shape", f"messages must be a list of messages, not {type(raw).__name__}")
    if not raw:
        raise RowError("empty", "messages must be a list with at least one message")
    messages = [_message(item) for item in raw]
    if isinstance(row.get("system"), str) and row["system"].strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    _check_order(messages, answers)
    unfinished = row.get("finish_reason") == "length" and messages[-1]["role"] == "assistant"
    return Conversation(messages, None, _tools(row.get("tools")), _template_kwargs(row), unfinished)


def _raw_messages(row: Mapping[str, Any], answers: bool) -> Any:
    for key in ("messages", "conversations", "conversation"):
        if row.get(key) is not None:
            return row[key]
    if row.get("prompt") is not None:
        return _prompt_and_response(row, answers)
    if row.get("turns") is not None:
        if answers:
            raise RowError("prompts_only", "a row of `turns` has prompts but no answers: use it for evaluation")
        turns = row["turns"]
        if not isinstance(turns, list):
            raise RowError("content", f"turns is a list of texts, not {type(turns).__name__}")
        for turn in turns:
            if not isinstance(turn, str):
                raise RowError("content", f"a turn is text, not {type(turn).__name__}")
        return [{"role": "user", "content": turn} for turn in turns]
    return None


def _prompt_and_response(row: Mapping[str, Any], answers: bool) -> list[Any]:
    answer = next((row[k] for k in ("response", "completion", "answer") if row.get(k) is not None), None)
    if answer is None and answers:
        raise RowError("prompts_only", "prompt without response or completion")
    prompt = row["prompt"]
    start = _text_or_messages("prompt", "user", prompt)
    return start if answer is None else start + _text_or_messages("an answer", "assistant", answer)


def _text_or_messages(what: str, role: str, value: Any) -> list[Any]:
    """A text as one message of a role; a list of messages as it is."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list | tuple):
        raise RowError("content", f"{what} is text or a list of messages, not {type(value).__name__}")
    return list(value)


def _message(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise RowError("content", f"a message is an object, not {type(item).__name__}")
    name = item.get("role")
    if name is None:
        name = item.get("from")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError("role", f"unknown role {name!r}; known: {', '.join(_ROLES)}")
    content = item.get("content")
    if content is None:
        content = item.get("value")
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(content)}
    reasoning = ""
    if isinstance(content, str):
        text = content
    elif content is None:
        text = ""
    else:
        text, reasoning = _parts(content)
    message: dict[str, Any] = {"role": role, "content": text}
    for key in _REASONING_KEYS:
        if isinstance(item.get(key), str) and item[key].strip():
            reasoning = item[key]
    if reasoning:
        message["reasoning_content"] = reasoning
    if item.get("tool_calls"):
        message["tool_calls"] = _tool_calls(item["tool_calls"])
    for key in ("name", "tool_call_id"):
        if isinstance(item.get(key), str):
            message[key] = item[key]
    if role in ("user", "assistant") and not text.strip() and len(message) == 2:
        raise RowError("empty", f"an empty {role} message")
    return message


def _parts(parts: Any) -> tuple[str, str]:
    if not isinstance(parts, Sequence):
        raise RowError("content", f"content is text or a list of parts, not {type(parts).__name__}")
    text, reasoning = [], []
    for part in parts:
        if isinstance(part, str):
            text.append(part)
            continue
        if not isinstance(part, Mapping):
            raise RowError("content", f"a content part is an object, not {type(part).__name__}")
        kind = part.get("type", "text")
        if not isinstance(kind, str):
            raise RowError("content", f"the type of a content part is text, not {type(kind).__name__}")
        if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            text.append(part["text"])
        elif kind in _THINKING_PARTS:
            reasoning.append(str(next((part[k] for k in (kind, "text") if part.get(k)), "")))
        else:
            raise RowError("multimodal", f"a content part of type {kind!r}: only text can be taught")
    return "".join(text), "\n".join(reasoning)


def _json(value: Any, reason: str) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError(reason, f"not JSON: {error}") from None
    return value


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    value = _json(value, "tool_calls")
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RowError("tool_calls", f"a list of calls, not {type(value).__name__}")
    result = []
    for call in calls:
        call = _json(call, "tool_calls")
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError("tool_calls", f"a call needs a function name: {str(call)[:80]}")
        arguments = _json(function.get("arguments") or {}, "tool_calls")
        entry = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            entry["id"] = call["id"]
        result.append(entry)
    return result


def _tools(value: Any) -> list[dict[str, Any]] | None:
    value = _json(value, "tools") if value else None
    if not value:
        return None
    if not isinstance(value, Sequence):
        raise RowError("tools", f"a list of tools, not {type(value).__name__}")
    tools = [_json(tool, "tools") for tool in value]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError("tools", "every tool is an object with a JSON schema")
    return [dict(tool) for tool in tools]


def _template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    value = _json(row.get("chat_template_kwargs") or {}, "template_kwargs")
    if not isinstance(value, Mapping):
        raise RowError("template_kwargs", f"chat_template_kwargs is an object, not {type(value).__name__}")
    return dict(value)


def _check_order(messages: list[dict[str, Any]], answers: bool = True) -> None:
    """System messages first, then a user; a tool result follows a call or another result."""
    previous = None
    for message in messages:
        role = message["role"]
        if role in ("system", "developer") and previous not in (None, "system", "developer"):
            raise RowError("role_order", f"a {role} message after a {previous} message")
        if role in ("assistant", "tool") and previous in (None, "system", "developer"):
            raise RowError("role_order", f"the first turn is {role}, not user")
        if role == "tool" and previous not in ("assistant", "tool"):
            raise RowError("role_order", f"a tool result after a {previous} message")
        if role == previous and role in ("user", "assistant") and answers:
            raise RowError("role_order", f"two {role} messages in a row")
        previous = role
    if answers and not any(message["role"] == "assistant" for message in messages):
        raise RowError("no_assistant", "no assistant message to learn from")
