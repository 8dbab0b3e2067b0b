"""Greedy generation is the target's own, token for token, whatever the drafter does."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from transformers import GenerationConfig

from modelopt_spec.decoding.generate import generate
from modelopt_spec.errors import ConfigError, DataError, UnsupportedError
from modelopt_spec.scheduling.policies import FixedLength, StaticThreshold
from tests.decoding.oracle import propose
from tests.decoding.tiny import HEADS, LAYOUTS, add_drafter, rig_head, tiny_target

LENGTHS = (9, 4, 13, 1)


def prompts(vocab: int = 61, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(4, vocab, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


def plain(model, ids: torch.Tensor, mask: torch.Tensor, count: int) -> list[list[int]]:
    """Each prompt alone through transformers' generate: whole rows, prompt included."""
    rows = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    return [model.generate(row[None], max_new_tokens=count, do_sample=False)[0].tolist() for row in rows]


def whole(ids: torch.Tensor, mask: torch.Tensor, result) -> list[list[int]]:
    return [[*row[keep.bool()].tolist(), *output] for row, keep, output in zip(ids, mask, result.outputs, strict=True)]


@functools.cache
def truth_of(name: str, count: int) -> list[list[int]]:
    """The target's own continuations of :func:`prompts`."""
    return plain(tiny_target(name), *prompts(), count)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3"])
def test_greedy_equals_transformers(name: str, head: str, layout: str):
    model = tiny_target(name)
    ids, mask = prompts()
    truth = truth_of(name, 16)
    add_drafter(model, head, layout)
    assert generate(model, ids[2:3], max_new_tokens=16).sequences.tolist() == [truth[2]]
    drafter = propose(model, truth, wrong_share=0.3)
    result = generate(model, ids, mask, max_new_tokens=16)
    assert whole(ids, mask, result) == truth
    assert 1.5 < result.tau < drafter.num_draft_tokens + 1
    # every committed position but the last anchor's was given to the drafter, once and in order
    for row, output in enumerate(result.outputs):
        assert drafter.extended[row] == list(range(len(drafter.extended[row])))
        assert len(drafter.extended[row]) < LENGTHS[row] + len(output)


@pytest.mark.parametrize("head", HEADS)
def test_perfect_and_hopeless_drafts(head: str):
    model = tiny_target("qwen3")
    ids, mask = prompts()
    truth = truth_of("qwen3", 16)
    add_drafter(model, head)
    drafter = propose(model, truth)
    block = drafter.num_draft_tokens + 1
    result = generate(model, ids[:1], mask[:1], max_new_tokens=1 + 2 * block)
    assert whole(ids[:1], mask[:1], result) == [truth[0][: 9 + 1 + 2 * block]]
    assert [r.committed for r in result.rounds] == [block] * 2
    propose(model, truth, wrong_share=1.0)
    result = generate(model, ids, mask, max_new_tokens=16)
    assert whole(ids, mask, result) == truth
    assert result.tau == 1.0


@pytest.mark.parametrize("head", HEADS[1:])
def test_a_rigged_head_brings_tau_to_one(head: str):
    model = tiny_target()
    ids, mask = prompts()
    truth = truth_of("llama", 20)
    add_drafter(model, head, pure_draft_prefix_len=0)
    propose(model, truth)
    assert generate(model, ids, mask, max_new_tokens=20).tau > 3
    unused = next(token for token in range(61) if all(token not in row for row in truth))
    rig_head(model, unused)
    result = generate(model, ids, mask, max_new_tokens=20)
    assert result.tau == 1.0
    assert whole(ids, mask, result) == truth
    assert all(set(r.drafted) == {unused} for r in result.rounds if r.drafted)


def test_pure_prefix_slots_of_domino_keep_base_logits():
    model = tiny_target()
    ids, mask = prompts()
    truth = truth_of("llama", 20)
    add_drafter(model, "gru")
    propose(model, truth)
    rig_head(model, next(token for token in range(61) if all(token not in row for row in truth)))
    rounds = generate(model, ids, mask, max_new_tokens=20).rounds
    assert {r.accepted for r in rounds if r.verified > 1} == {1}


def test_eager_attention_takes_batches_too():
    model = tiny_target("gemma3", attn_implementation="eager")
    ids, mask = prompts()
    truth = plain(model, ids, mask, 16)
    propose(add_drafter(model), truth, wrong_share=0.3)
    assert model.config._attn_implementation == "eager"
    assert whole(ids, mask, generate(model, ids, mask, max_new_tokens=16)) == truth


def test_right_padding_and_recognised_padding():
    model = add_drafter(tiny_target())
    ids, mask = prompts(lengths=(7, 7, 7))
    right = torch.cat([ids, torch.zeros(3, 2, dtype=torch.long)], 1)
    keep = torch.cat([mask, torch.zeros(3, 2, dtype=torch.long)], 1)
    want = generate(model, ids, mask, max_new_tokens=9).outputs
    assert generate(model, right, keep, max_new_tokens=9).outputs == want
    assert generate(model, right, max_new_tokens=9, pad_token_id=0).outputs == want


def test_num_draft_tokens_up_to_the_block():
    model = tiny_target()
    ids, mask = prompts()
    truth = truth_of("llama", 20)
    propose(add_drafter(model), truth)
    for count in (1, 2, 5):
        result = generate(model, ids[:1], mask[:1], max_new_tokens=20, num_draft_tokens=count)
        assert whole(ids[:1], mask[:1], result) == truth[:1]
        assert {len(r.drafted) for r in result.rounds} <= {count, 0}
        assert result.rounds[0].committed == count + 1
    for count in (0, 6):
        with pytest.raises(ConfigError, match="drafts 1 to 5"):
            generate(model, ids[:1], max_new_tokens=20, num_draft_tokens=count)


@pytest.mark.parametrize("head", ["vanilla", "none"])
def test_a_scheduler_shortens_rounds_and_changes_no_token(head: str):
    model = tiny_target()
    ids, mask = prompts()
    truth = truth_of("llama", 20)
    propose(add_drafter(model, head), truth, wrong_share=0.2)
    full = generate(model, ids, mask, max_new_tokens=20)
    short = generate(model, ids, mask, max_new_tokens=20, scheduler=FixedLength(5, 2))
    assert short.outputs == full.outputs
    assert {r.verified for r in short.rounds} <= {0, 1, 2}
    assert len(short.rounds) > len(full.rounds)
    none = generate(model, ids, mask, max_new_tokens=20, scheduler=FixedLength(5, 0))
    assert none.outputs == full.outputs
    assert none.tau == 1
    if head == "vanilla":
        mixed = generate(model, ids, mask, max_new_tokens=20, scheduler=StaticThreshold(5, 0.4))
        assert mixed.outputs == full.outputs
        assert len({r.verified for r in mixed.rounds}) > 1
    with pytest.raises(ConfigError, match="blocks of 4"):
        generate(model, ids, mask, max_new_tokens=20, scheduler=FixedLength(4, 2))


def test_end_of_text_and_limits():
    model = tiny_target()
    ids, mask = prompts()
    truth = truth_of("llama", 30)
    eos = truth[0][9 + 12]
    want = [row[: n + next((i + 1 for i, t in enumerate(row[n:]) if t == eos), 30)] for row, n in zip(truth, LENGTHS)]
    propose(add_drafter(model), truth)
    result = generate(model, ids, mask, max_new_tokens=30, eos_token_id=eos)
    assert whole(ids, mask, result) == want
    assert result.stopped == tuple("eos" if row[-1] == eos else "length" for row in want)
    assert "eos" in result.stopped
    for row, output in enumerate(result.outputs):
        rounds = [r for r in result.rounds if r.prompt == row]
        assert [r.round for r in rounds] == list(range(len(rounds)))
        assert sum(r.committed for r in rounds) == len(output) - 1
        assert all(r.committed == r.accepted + 1 for r in rounds[:-1])
        if rounds and result.stopped[row] == "eos":
            assert rounds[-1].committed in (rounds[-1].accepted, rounds[-1].accepted + 1)
            assert rounds[-1].accepted <= rounds[-1].verified
    # as one tensor, like transformers
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = eos, 2
    plain_batch = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    assert torch.equal(generate(model, ids, mask, max_new_tokens=30).sequences, plain_batch)
    assert generate(model, ids, mask, max_new_tokens=1).outputs == tuple((row[n],) for row, n in zip(truth, LENGTHS))


def test_beyond_the_targets_positions_warns():
    model = add_drafter(tiny_target("llama"))
    positions = model.config.max_position_embeddings
    ids = torch.tensor([[5, 6, 7]])
    with pytest.warns(UserWarning, match=f"max_new_tokens {positions - 2} reach beyond the {positions} positions"):
        generate(model, ids, max_new_tokens=positions - 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, ids, max_new_tokens=positions - 3)
        padded, mask = torch.nn.functional.pad(ids, (positions - 8, 0)), torch.ones(1, positions - 5, dtype=torch.long)
        mask[:, : positions - 8] = 0
        generate(model, padded, mask, max_new_tokens=9)


def test_first_token_may_end_everything():
    model = tiny_target()
    ids, mask = prompts(lengths=(5,))
    first = plain(model, ids, mask, 1)[0][-1]
    result = generate(add_drafter(model), ids, max_new_tokens=9, eos_token_id=[first, 60])
    assert result.outputs == ((first,),)
    assert result.rounds == ()


def test_generation_config_and_streaming():
    model = tiny_target()
    ids, mask = prompts()
    truth = truth_of("llama", 12)
    propose(add_drafter(model), truth, wrong_share=0.3)
    seen: list[list[int]] = [[], [], [], []]
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None)
    result = generate(model, ids, mask, generation_config=config, streamer=lambda row, tokens: seen[row].extend(tokens))
    assert [list(output) for output in result.outputs] == seen
    assert whole(ids, mask, result) == truth
    by_length = GenerationConfig(max_length=13 + 12, do_sample=False)
    assert generate(model, ids, mask, generation_config=by_length).outputs == result.outputs

    class Streamer:
        def __init__(self):
            self.values, self.ended = [], False

        def put(self, value):
            self.values += value.flatten().tolist()

        def end(self):
            self.ended = True

    propose(model, truth[2:3], wrong_share=0.3)
    streamer = Streamer()
    generate(model, ids[2:3], max_new_tokens=12, streamer=streamer)
    assert streamer.values == truth[2]
    assert streamer.ended
    with pytest.raises(ConfigError, match="one prompt at a time"):
        generate(model, ids, mask, max_new_tokens=12, streamer=Streamer())


def test_modes_and_gradients_come_back():
    model = add_drafter(tiny_target())
    model.train()
    model.lm_head.eval()
    before = {name: module.training for name, module in model.named_modules()}
    result = generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=6)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not result.sequences.requires_grad
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("field", "value"), [("repetition_penalty", 1.2), ("num_beams", 2), ("min_new_tokens", 3), ("min_p", 0.1)]
)
def test_what_cannot_be_reproduced_is_refused_by_name(field: str, value: object):
    model = add_drafter(tiny_target())
    config = GenerationConfig(max_new_tokens=4, do_sample=True, **{field: value})
    with pytest.raises(UnsupportedError, match=field):
        generate(model, torch.tensor([[5, 6]]), generation_config=config)


def test_caches_that_cannot_be_cut_are_refused():
    model = add_drafter(tiny_target())
    for name in ("static", "quantized", "offloaded"):
        config = GenerationConfig(max_new_tokens=4, cache_implementation=name)
        with pytest.raises(UnsupportedError, match="cache_implementation"):
            generate(model, torch.tensor([[5, 6]]), generation_config=config)


def test_a_drafter_keeps_its_master_weights_on_a_target_of_a_narrower_type():
    """What training leaves in memory: a bfloat16 target and a float32 drafter."""
    model = add_drafter(tiny_target(dtype=torch.bfloat16))
    ids = torch.tensor([[5, 6, 7, 8]])
    narrow = generate(model, ids, max_new_tokens=12, eos_token_id=None)
    model.drafter.float()
    wide = generate(model, ids, max_new_tokens=12, eos_token_id=None)
    assert wide.sequences.tolist() == narrow.sequences.tolist()
    assert wide.rounds


def test_bad_prompts_and_settings_are_named():
    model = tiny_target()
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ConfigError, match="has no drafter"):
        generate(model, ids, max_new_tokens=4)
    add_drafter(model)
    with pytest.raises(DataError, match="input_ids is a list: it must be a tensor"):
        generate(model, [[5, 6, 7]], max_new_tokens=4)
    with pytest.raises(DataError, match=r"torch\.float32: token ids are integers"):
        generate(model, ids.float(), max_new_tokens=4)
    with pytest.raises(ConfigError, match="max_new_tokens is not set"):
        generate(model, ids)
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        generate(model, ids, max_new_tokens=0)
    with pytest.raises(DataError, match="prompt 0 holds no token"):
        generate(model, ids, torch.zeros_like(ids), max_new_tokens=4)
    with pytest.raises(DataError, match="has a hole"):
        generate(model, ids, torch.tensor([[1, 0, 1]]), max_new_tokens=4)
    with pytest.raises(DataError, match="must agree"):
        generate(model, ids, torch.ones(1, 4), max_new_tokens=4)
    with pytest.raises(DataError, match="input_ids has shape"):
        generate(model, ids[0], torch.ones(3), max_new_tokens=4)
    with pytest.raises(DataError, match="id 61, but the target embeds 61"):
        generate(model, torch.tensor([[5, 61]]), max_new_tokens=4)
    with pytest.raises(ConfigError, match="need the tokenizer"):
        generate(model, ids, max_new_tokens=4, stop_strings="x")
    with pytest.raises(ConfigError, match="empty string"):
        generate(model, ids, max_new_tokens=4, stop_strings=["x", ""])
    with pytest.raises(DataError, match="id -1: ids run from 0 to 60"):
        generate(model, torch.tensor([[-1, 3]]), max_new_tokens=4)
    padded = torch.tensor([[-100, 3]]), torch.tensor([[0, 1]])
    assert (
        generate(model, *padded, max_new_tokens=4).outputs
        == generate(model, ids[:, :0].new_tensor([[3]]), max_new_tokens=4).outputs
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_new_tokens", value) for value in ("4", float("nan"), 1.5, True, -1, [4])),
        *(("temperature", value) for value in ("1", True, float("inf"), -0.1)),
        *(("top_k", value) for value in (1.5, "3", -1, True)),
        *(("top_p", value) for value in ("1", 0.0, float("nan"))),
        *(("eos_token_id", value) for value in ("x", -5, 10**9, [3, 61], 1.5)),
        *(("pad_token_id", value) for value in ("x", -1)),
        *(("num_draft_tokens", value) for value in ("2", 1.5, 0)),
        *(("seed", value) for value in ("x", -1, 0.5)),
        ("do_sample", "yes"),
        ("stop_strings", 5),
        ("generation_config", {"max_new_tokens": 4}),
        ("streamer", 5),
        ("scheduler", 5),
    ],
)
def test_arguments_that_cannot_be_meant_are_named(name: str, value):
    arguments = {"max_new_tokens": 4, name: value}
    with pytest.raises(ConfigError, match=f"^{name} is "):
        generate(add_drafter(tiny_target()), torch.tensor([[5, 6]]), **arguments)
