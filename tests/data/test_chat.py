"""Which tokens are supervised, for templates of every style."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_spec.data.chat import ChatRenderer, render_prompt, render_row
from modelopt_spec.data.chat_reference import reference_row, reference_tagged_row
from modelopt_spec.data.config import DataConfig
from modelopt_spec.data.messages import RowError
from modelopt_spec.errors import DataError
from tests.data import tiny

TWO_TURNS = tiny.chat("Hello there!", "How are you?", "Fine. And the capital?", "Paris, the capital of France.")

STYLES = {
    "chatml": (tiny.CHATML, "<|im_end|>", ["How are you?<|im_end|>", "Paris, the capital of France.<|im_end|>"]),
    "chatml_tags": (
        tiny.CHATML_TAGS, "<|im_end|>", ["How are you?<|im_end|>", "Paris, the capital of France.<|im_end|>"],
    ),
    "chatml_tags_without_end": (
        tiny.CHATML_TAGS_NARROW, "<|im_end|>", ["How are you?<|im_end|>", "Paris, the capital of France.<|im_end|>"],
    ),
    "chatml_tags_with_line_break": (
        tiny.CHATML_TAGS_WIDE, "<|im_end|>", ["How are you?<|im_end|>", "Paris, the capital of France.<|im_end|>"],
    ),
    "llama3": (tiny.LLAMA3, "<|eot|>", ["How are you?<|eot|>", "Paris, the capital of France.<|eot|>"]),
    "gemma": (tiny.GEMMA, "</turn>", ["How are you?</turn>", "Paris, the capital of France.</turn>"]),
    "llama2": (tiny.LLAMA2, "</s>", [" How are you? </s>", " Paris, the capital of France. </s>"]),
    "phi": (tiny.PHI, "<|endoftext|>", ["How are you?<|end|>", "Paris, the capital of France.<|end|>"]),
    "header_only": (tiny.HEADER_ONLY, "</s>", ["How are you?</s>", "Paris, the capital of France.</s>"]),
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_answers_and_turn_ends_are_supervised_and_nothing_else(style: str, kind: str) -> None:
    template, eos, expected = STYLES[style]
    tokenizer = tiny.make_tokenizer(template, kind, eos)
    (row,) = render_row(TWO_TURNS, tokenizer)
    assert row.input_ids == tokenizer.apply_chat_template(TWO_TURNS["messages"], return_dict=True)["input_ids"]
    found = tiny.supervised_text(tokenizer, row)
    assert [text.strip() for text in found] == [text.strip() for text in expected]
    (last,) = render_row(TWO_TURNS, tokenizer, DataConfig(supervise="last"))
    assert last.input_ids == row.input_ids
    assert [text.strip() for text in tiny.supervised_text(tokenizer, last)] == [expected[-1].strip()]


@pytest.mark.parametrize("style", ["chatml", "llama3", "gemma"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_prefix_rendering_equals_the_plain_version(style: str, data: st.DataObject) -> None:
    template, eos, _ = STYLES[style]
    tokenizer = tiny.make_tokenizer(template, eos=eos)
    words = st.text(st.sampled_from("ab é漢🙂\n.<|>"), min_size=1, max_size=12).map(lambda text: f"x{text}y")
    turns = data.draw(st.lists(words, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
    supervise = data.draw(st.sampled_from(["all", "last"]))
    row = tiny.chat(*turns)
    (result,) = render_row(row, tokenizer, DataConfig(supervise=supervise))
    assert (result.input_ids, result.loss_mask) == reference_row(row["messages"], tokenizer, supervise)


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.text(st.sampled_from("ab é漢🙂\n."), max_size=12).map(lambda t: f"x{t}y"), min_size=2, max_size=6)
)
def test_tagged_rendering_equals_transformers_mask(turns: list[str]) -> None:
    tokenizer = tiny.make_tokenizer(tiny.CHATML_TAGS)
    row = tiny.chat(*turns[: len(turns) // 2 * 2])
    (result,) = render_row(row, tokenizer)
    assert (result.input_ids, result.loss_mask) == reference_tagged_row(row["messages"], tokenizer)


def test_a_stock_template_gives_no_mask_by_itself() -> None:
    """The trap that prefix rendering is for: without tags transformers says that nothing is the assistant's."""
    tokenizer = tiny.make_tokenizer(tiny.CHATML)
    _, mask = reference_tagged_row(TWO_TURNS["messages"], tokenizer)
    assert not any(mask)
    assert any(render_row(TWO_TURNS, tokenizer)[0].loss_mask)


@pytest.mark.parametrize("style", ["chatml", "chatml_tags_without_end", "llama3", "llama2"])
def test_the_end_of_a_turn_that_the_model_did_not_end_is_not_supervised(style: str) -> None:
    template, eos, expected = STYLES[style]
    tokenizer = tiny.make_tokenizer(template, eos=eos)
    (full,) = render_row(TWO_TURNS, tokenizer)
    (cut,) = render_row({**TWO_TURNS, "finish_reason": "length"}, tokenizer)
    assert cut.input_ids == full.input_ids
    found = [text.strip() for text in tiny.supervised_text(tokenizer, cut)]
    assert found == [expected[0].strip(), "Paris, the capital of France."]
    assert render_row({**TWO_TURNS, "finish_reason": "stop"}, tokenizer) == [full]


def test_a_trailing_user_turn_is_cut_off() -> None:
    tokenizer = tiny.make_tokenizer()
    longer = {"messages": [*TWO_TURNS["messages"], {"role": "user", "content": "Thanks!"}]}
    assert render_row(longer, tokenizer) == render_row(TWO_TURNS, tokenizer)


THINKING = tiny.chat(
    "Hello", "<think>\nfirst thought\n</think>\n\nHi!", "And now?", "<think>\nsecond thought\n</think>\n\nBye."
)


def test_rewritten_turns_get_rows_of_their_own() -> None:
    tokenizer = tiny.make_tokenizer(tiny.QWEN3)
    first, second = render_row(THINKING, tokenizer)
    assert tiny.supervised_text(tokenizer, first) == ["<think>\nfirst thought\n</think>\n\nHi!<|im_end|>"]
    assert tiny.supervised_text(tokenizer, second) == ["<think>\nsecond thought\n</think>\n\nBye.<|im_end|>"]
    assert "first thought" not in tokenizer.decode(second.input_ids)
    assert "Hi!" in tokenizer.decode(second.input_ids)


def test_rewritten_turns_may_be_dropped_or_refused() -> None:
    tokenizer = tiny.make_tokenizer(tiny.QWEN3)
    split = render_row(THINKING, tokenizer)
    assert render_row(THINKING, tokenizer, DataConfig(rewrites="last")) == split[1:]
    assert render_row(THINKING, tokenizer, DataConfig(supervise="last")) == split[1:]
    with pytest.raises(DataError, match="template_rewrites"):
        render_row(THINKING, tokenizer, DataConfig(rewrites="refuse"))


def test_reasoning_content_equals_inline_thinking() -> None:
    tokenizer = tiny.make_tokenizer(tiny.QWEN3)
    parts = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!", "reasoning_content": "first thought"},
    ]
    inline = {"messages": THINKING["messages"][:2]}
    assert render_row({"messages": parts}, tokenizer) == render_row(inline, tokenizer)
    listed = [parts[0], {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "first thought"}, {"type": "text", "text": "Hi!"}]}]  # fmt: skip
    assert render_row({"messages": listed}, tokenizer) == render_row(inline, tokenizer)


def test_a_template_without_thinking_gets_it_inside_of_the_content() -> None:
    tokenizer = tiny.make_tokenizer(tiny.CHATML)
    row = {
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!", "reasoning": "hm"}]
    }
    assert tiny.supervised_text(tokenizer, render_row(row, tokenizer)[0]) == ["<think>\nhm\n</think>\n\nHi!<|im_end|>"]


def test_thinking_that_the_prompt_opens_is_taught_as_it_was_generated() -> None:
    tokenizer = tiny.make_tokenizer(tiny.R1, eos="<|endoftext|>")
    first, second = render_row(THINKING, tokenizer)
    assert tokenizer.decode(first.input_ids).endswith("<think>\nfirst thought\n</think>\n\nHi!<|endoftext|>")
    assert tiny.supervised_text(tokenizer, first) == ["first thought\n</think>\n\nHi!<|endoftext|>"]
    assert "<|assistant|>Hi!<|endoftext|>" in tokenizer.decode(second.input_ids)
    with pytest.raises(DataError, match="template_spans"):
        render_row(tiny.chat("Hello", "Hi without thinking"), tokenizer)


def test_the_mode_of_thinking_must_agree_with_the_data() -> None:
    tokenizer = tiny.make_tokenizer(tiny.QWEN3)
    off = DataConfig(template_kwargs={"enable_thinking": False})
    with pytest.raises(DataError, match="enable_thinking"):
        render_row(THINKING, tokenizer, off)
    (row,) = render_row(tiny.chat("Hello", "Hi!"), tokenizer, off)
    assert tiny.supervised_text(tokenizer, row) == ["Hi!<|im_end|>"]
    own = {**tiny.chat("Hello", "Hi!"), "chat_template_kwargs": {"enable_thinking": False}}
    assert render_row(own, tokenizer) == [row]


def test_lost_content_is_refused() -> None:
    tokenizer = tiny.make_tokenizer(tiny.DROPS_SYSTEM)
    with pytest.raises(DataError, match=r"content_lost.*system"):
        render_row(tiny.chat("Hello", "Hi!", system="Be brief."), tokenizer)


def test_system_messages_are_kept_merged_or_dropped() -> None:
    tokenizer = tiny.make_tokenizer(tiny.GEMMA, eos="</turn>")
    row = tiny.chat("Hello", "Hi!", system="Be brief.")
    with pytest.raises(DataError, match="System role not supported"):
        render_row(row, tokenizer)
    (merged,) = render_row(row, tokenizer, DataConfig(system_role="merge"))
    assert "Be brief.\n\nHello" in tokenizer.decode(merged.input_ids)
    assert render_row(row, tokenizer, DataConfig(system_role="drop")) == render_row(
        tiny.chat("Hello", "Hi!"), tokenizer
    )


def test_tool_calls_and_results_are_rendered_and_only_the_assistant_is_taught() -> None:
    tokenizer = tiny.make_tokenizer(tiny.LLAMA3, eos="<|eot|>")
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]
    row = {"messages": [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 3."},
    ]}  # fmt: skip
    (result,) = render_row(row, tokenizer)
    assert tiny.supervised_text(tokenizer, result) == ['add{"a": 1, "b": 2}<|eom|>', "It is 3.<|eot|>"]


def test_truncation_is_counted_and_never_leaves_an_unsupervised_stub() -> None:
    tokenizer = tiny.make_tokenizer()
    (full,) = render_row(TWO_TURNS, tokenizer)
    first = full.loss_mask.index(True)
    (cut,) = render_row(TWO_TURNS, tokenizer, DataConfig(max_length=first + 3))
    assert cut.input_ids == full.input_ids[: first + 3]
    assert cut.lost_tokens == len(full.input_ids) - first - 3
    assert cut.lost_supervised == sum(full.loss_mask) - 3
    stub, = ChatRenderer(tokenizer, DataConfig(max_length=first + 1))([TWO_TURNS])  # fmt: skip
    assert isinstance(stub, RowError)
    assert stub.reason == "truncated_away"
    with pytest.raises(DataError, match="too_long"):
        render_row(TWO_TURNS, tokenizer, DataConfig(max_length=first + 3, overlong="skip"))


def test_plain_text_is_supervised_everywhere_and_needs_no_template() -> None:
    tokenizer = tiny.make_tokenizer(None)
    (row,) = render_row({"text": "The quick brown fox"}, tokenizer)
    assert tokenizer.decode(row.input_ids) == "The quick brown fox"
    assert all(row.loss_mask)
    with pytest.raises(DataError, match="no chat template"):
        render_row(TWO_TURNS, tokenizer)


def test_a_template_file_and_a_fixed_date(tmp_path) -> None:
    tokenizer = tiny.make_tokenizer(None)
    (tmp_path / "t.jinja").write_text(tiny.DATED)
    config = DataConfig(chat_template=str(tmp_path / "t.jinja"), date="2026-01-31")
    assert tokenizer.decode(render_row(TWO_TURNS, tokenizer, config)[0].input_ids).startswith("Today: 31 Jan 2026\n")
    with pytest.raises(DataError, match="no such file"):
        render_row(TWO_TURNS, tokenizer, DataConfig(chat_template="missing.jinja"))


def test_prompts_end_with_the_generation_prompt() -> None:
    tokenizer = tiny.make_tokenizer()
    messages = TWO_TURNS["messages"][:1]
    assert render_prompt(messages, tokenizer) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )["input_ids"]  # fmt: skip


def test_a_batch_keeps_the_order_of_good_and_bad_rows() -> None:
    tokenizer = tiny.make_tokenizer()
    rows = [TWO_TURNS, {"text": "The quick brown fox"}, {"messages": []}, tiny.chat("Hello", "How are you?"), {"x": 1}]
    results = ChatRenderer(tokenizer)(rows)
    assert [result.reason if isinstance(result, RowError) else "row" for result in results] == [
        "row", "row", "empty", "row", "unknown_shape",
    ]  # fmt: skip
    for row, result in zip(rows, results, strict=True):
        if not isinstance(result, RowError):
            assert result == render_row(row, tokenizer)


class _WithoutOffsets:
    """A tokenizer that has ids but no offsets, as slow tokenizers do."""

    is_fast = False

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def __call__(self, *args, **kwargs):
        return self._tokenizer(*args, **kwargs)


def test_tokenizers_without_offsets_give_the_same_rows() -> None:
    tokenizer = tiny.make_tokenizer()
    assert ChatRenderer(_WithoutOffsets(tokenizer))([TWO_TURNS]) == ChatRenderer(tokenizer)([TWO_TURNS])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_start_that_rows_share_is_tokenized_once_and_alike(kind: str, data: st.DataObject) -> None:
    tokenizer = tiny.make_tokenizer(tiny.CHATML, kind)
    words = st.text(st.sampled_from("ab é漢\n.<|>"), max_size=8).map(lambda text: f"x{text}y")
    system = data.draw(st.sampled_from([None, "You are a helpful assistant, answer all questions."]))
    rows = [tiny.chat(data.draw(words), data.draw(words), system=system) for _ in range(3)]
    renderer = ChatRenderer(tokenizer)
    together = renderer(rows)
    assert together == [renderer([row])[0] for row in rows]
    if system:
        assert renderer.encoder._shared_start([item.rows[0] for item in renderer.render_all(rows)]) > len(system)
    assert renderer.encoder._share


def test_a_token_across_the_start_of_an_answer_is_not_supervised() -> None:
    """Without a line break between prompt and answer one token can hold characters of both."""
    template = "{% for m in messages %}{{ m.content if m.role == 'user' else 'ca' + m.content + '</s>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'ca' }}{% endif %}"
    tokenizer = tiny.make_tokenizer(template, eos="</s>")
    (row,) = render_row(tiny.chat("Hello ", "pital of France"), tokenizer)
    assert row.straddling == 1
    assert not tiny.supervised_text(tokenizer, row)[0].startswith("p")
    with pytest.raises(DataError, match="merges tokens"):
        ChatRenderer(_WithoutOffsets(tokenizer))([tiny.chat("Hello ", "pital of France")])
