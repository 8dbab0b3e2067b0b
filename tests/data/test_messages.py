"""Rows of every shape come out as one; rows that cannot be used say why."""

from __future__ import annotations

import pytest

from modelopt_spec.data.messages import Conversation, RowError, first_prompt, join_thinking, parse_row, split_thinking

PLAIN = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": PLAIN},
        {"conversations": PLAIN, "id": 7},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi!"}]},
        {"prompt": "Hello", "response": "Hi!"},
        {"prompt": PLAIN[:1], "completion": "Hi!"},
        {"prompt": PLAIN[:1], "completion": PLAIN[1:]},
        {
            "messages": [
                PLAIN[0],
                {"role": "assistant", "content": [{"type": "text", "text": "Hi!"}], "tool_calls": None},
            ]
        },
    ],
)
def test_shapes(row: dict) -> None:
    assert parse_row(row).messages == PLAIN


def test_sharegpt_calls_results_and_system() -> None:
    row = {
        "system": "Be brief.",
        "tools": '[{"name": "add"}]',
        "conversations": [
            {"from": "human", "value": "1+2"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "3"},
        ],
    }
    conversation = parse_row(row)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert conversation.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert conversation.tools == [{"name": "add"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "not_an_object"),
        ({"question": "x"}, "unknown_shape"),
        ({"messages": "Hello"}, "unknown_shape"),
        ({"messages": 5}, "unknown_shape"),
        (5, "not_an_object"),
        ({"prompt": 5, "response": "x"}, "content"),
        ({"prompt": "x", "response": 5}, "content"),
        ({"prompt": {"role": "user"}, "response": "x"}, "content"),
        ({"prompt": [5], "response": "x"}, "content"),
        ({"text": 5}, "content"),
        ({"messages": [PLAIN[0], {"role": "assistant", "content": {"text": "x"}}]}, "content"),
        ({"messages": [{"role": "user", "content": [5]}, PLAIN[1]]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}, PLAIN[1]]}, "content"),
        ({"messages": []}, "empty"),
        ({"text": "  "}, "empty"),
        ({"turns": ["Hello"]}, "prompts_only"),
        ({"prompt": "Hello"}, "prompts_only"),
        ({"messages": ["Hello"]}, "content"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "role"),
        ({"messages": PLAIN[1:]}, "role_order"),
        ({"messages": [*PLAIN, PLAIN[1]]}, "role_order"),
        ({"messages": [PLAIN[0], {"role": "system", "content": "x"}, PLAIN[1]]}, "role_order"),
        ({"messages": [PLAIN[0], {"role": "tool", "content": "x"}, PLAIN[1]]}, "role_order"),
        ({"messages": PLAIN[:1]}, "no_assistant"),
        ({"messages": [PLAIN[0], {"role": "assistant", "content": ""}]}, "empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, PLAIN[1]]}, "multimodal"),
        ({"messages": PLAIN, "tools": "not json"}, "tools"),
        ({"messages": PLAIN, "tools": '["x"]'}, "tools"),
        ({"messages": [PLAIN[0], {"role": "assistant", "tool_calls": "x("}]}, "tool_calls"),
        ({"messages": [PLAIN[0], {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool_calls"),
        ({"messages": PLAIN, "chat_template_kwargs": "[1]"}, "template_kwargs"),
    ],
)
def test_reasons(row: object, reason: str) -> None:
    with pytest.raises(RowError) as error:
        parse_row(row)  # type: ignore[arg-type]
    assert error.value.reason == reason


@pytest.mark.parametrize("row", [{"prompt": 5}, {"turns": [5]}, {"turns": 5}, {"turns": ["x", {}]}])
def test_prompts_that_are_no_text(row: dict[str, object]) -> None:
    with pytest.raises(RowError, match=r"^content: .* text"):
        parse_row(row, answers=False)


def test_digest_sees_everything_that_is_rendered() -> None:
    base = parse_row({"messages": PLAIN})
    assert base.digest() == parse_row({"conversations": PLAIN, "id": 1}).digest()
    others = [
        parse_row({"messages": [PLAIN[0], {**PLAIN[1], "reasoning": "hm"}]}),
        parse_row({"messages": PLAIN, "tools": [{"name": "add"}]}),
        parse_row({"messages": PLAIN, "chat_template_kwargs": {"enable_thinking": False}}),
        parse_row({"messages": [{"role": "user", "content": "HelloHi!"}, {"role": "assistant", "content": "x"}]}),
        Conversation(text="HelloHi!"),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == 1 + len(others)


def test_prompts_and_thinking() -> None:
    row = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": " Hello \n you"}, PLAIN[1]]}
    assert first_prompt(parse_row(row)) == "Hello you"
    assert split_thinking("<think>\na\n</think>\n\nb") == ("a", "b")
    assert split_thinking("a</think>b") == ("a", "b")
    assert split_thinking("no tags") == ("", "no tags")
    assert split_thinking(join_thinking("a", "b")) == ("a", "b")
