"""Outputs end where transformers' end, whatever a round commits at once."""

from __future__ import annotations

import pytest
import torch

from modelopt_spec.decoding.generate import generate
from modelopt_spec.decoding.sampling import GREEDY
from modelopt_spec.decoding.settings import Settings
from modelopt_spec.decoding.stopping import StopRules
from tests.decoding.oracle import propose
from tests.decoding.texts import tiny_tokenizer
from tests.decoding.tiny import add_drafter, tiny_target


def rules(limit: int = 10, eos: tuple[int, ...] = (), strings: tuple[str, ...] = ()) -> StopRules:
    return StopRules(Settings(limit, GREEDY, frozenset(eos), 0, False, strings), tiny_tokenizer())


def test_end_of_text_cuts_behind_itself():
    assert rules(eos=(7, 8)).cut([1], [2], [3, 8, 4, 7]) == (2, "eos")
    assert rules(eos=(7,)).cut([7], [], [3, 4]) == (2, None)


def test_limits():
    assert rules(limit=5).cut([1], [2, 2, 2], [3, 4, 5]) == (2, "length")
    assert rules(limit=5).cut([1], [2, 2, 2], [3, 4]) == (2, "length")
    assert rules(limit=5).cut([1], [2, 2], [3, 4]) == (2, None)
    assert rules(limit=2, eos=(4,)).cut([1], [], [3, 4]) == (2, "eos")
    assert rules(limit=5).room([1, 2]) == 3


@pytest.mark.parametrize(
    ("text", "strings", "kept"),
    [
        ("go on, stop here", ("stop",), "go on, stop"),
        ("go on, stopped", ("top",), "go on, stop"),
        ("go on, stop here", ("nope", "on, s"), "go on, stop"),
        ("nothing", ("stop",), None),
    ],
)
def test_stop_strings(text: str, strings: tuple[str, ...], kept: str | None):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    for split in (1, 3, len(ids)):
        output: list[int] = []
        reason = None
        stops = rules(limit=100, strings=strings)
        for start in range(0, len(ids), split):
            count, reason = stops.cut([], output, ids[start : start + split])
            output += ids[start : start + count]
            if reason:
                break
        assert reason == (None if kept is None else "stop_string")
        assert tokenizer.decode(output) == (text if kept is None else kept)


def test_a_stop_string_may_begin_in_the_prompt():
    ids = tiny_tokenizer()("abcdef")["input_ids"]
    assert rules(strings=("cd",)).cut(ids[:3], [], ids[3:]) == (1, "stop_string")


def test_generate_stops_as_transformers_does():
    tokenizer = tiny_tokenizer()
    model = tiny_target(vocab_size=len(tokenizer) + 3)
    ids = torch.tensor([tokenizer("the stop")["input_ids"]])
    free = model.generate(ids, max_new_tokens=40, do_sample=False).tolist()
    pieces = [tokenizer.decode(token) for token in free[0][len(ids[0]) :]]
    ends = [i for i, piece in enumerate(pieces) if i > 4 and piece.isascii() and piece not in pieces[:i]]
    propose(add_drafter(model), free, wrong_share=0.2)
    for strings in (pieces[ends[0]], ["@@@", pieces[ends[-1]]]):
        settings = {"max_new_tokens": 40, "do_sample": False, "stop_strings": strings, "tokenizer": tokenizer}
        want = model.generate(ids, **settings)
        result = generate(model, ids, **settings)
        assert result.stopped == ("stop_string",)
        assert torch.equal(result.sequences, want)
        assert 1 < want.shape[1] - ids.shape[1] < 40
