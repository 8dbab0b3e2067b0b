"""One block: shapes, the number of slots, reduced vocabularies, and the head's own order of things."""

from __future__ import annotations

import pytest
import torch

from modelopt_spec.decoding.draft import BlockDrafter, check_num_draft_tokens
from modelopt_spec.decoding.generate import generate
from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.sampling import GREEDY, Sampling, probabilities
from modelopt_spec.errors import ConfigError
from modelopt_spec.records import BlockBatch
from tests.decoding.tiny import HEADS, LAYOUTS, add_drafter, tiny_target


def drafting(model, rows: int = 2, count: int | None = None, sampling: Sampling = GREEDY) -> BlockDrafter:
    """A drafter that has seen seven positions in row 0 and four in row 1."""
    drafter = model.drafter
    block = BlockDrafter(drafter, rows, check_num_draft_tokens(drafter, count), sampling, RowRandom(rows, seed=0))
    taps = torch.randn(rows, 7, drafter.fc.in_features, generator=torch.Generator().manual_seed(1))
    block.extend(taps.to(drafter.dtype), torch.tensor([7, 4, 5][:rows]))
    return block


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_tokens_are_the_argmax_of_the_teacher_forced_logits(head: str, layout: str):
    """Fed with its own draft tokens, the training pass over the same block gives the same tokens back."""
    model = add_drafter(tiny_target(dtype=torch.float64), head, layout)
    drafter = model.drafter
    block = drafting(model).draft(torch.tensor([11, 12]), [0, 1], [5, 5])
    first, count = (1 if layout == "bonus_anchor" else 0), block.tokens.shape[1]
    assert count == drafter.num_draft_tokens == 5 - (layout == "bonus_anchor" or head == "gru")
    size = drafter.config.block_size
    prev = torch.zeros(2, size, dtype=torch.long)
    prev[:, first : first + count] = block.prev_ids
    hidden = torch.zeros(2, size, block.hidden.shape[-1], dtype=torch.float64)
    hidden[:, first : first + count] = block.hidden
    latents = None if drafter.head is None else drafter.head.latents(prev, hidden)
    logits = drafter.logits(hidden, latents)[:, first : first + count]
    assert torch.equal(logits.argmax(-1), block.tokens)
    assert torch.equal(block.prev_ids, torch.cat([torch.tensor([[11], [12]]), block.tokens[:, :-1]], 1))
    if drafter.config.confidence.enabled:
        torch.testing.assert_close(block.confidence, drafter.confidence(block.hidden, block.prev_ids))
    else:
        assert block.confidence is None


@pytest.mark.parametrize("head", ["none", "vanilla"])
@torch.no_grad()
def test_decoding_equals_the_training_pass(head: str):
    """The cache and the block attention of training see the same context: the same hidden states."""
    model = add_drafter(tiny_target(dtype=torch.float64), head)
    drafter = model.drafter
    taps = torch.randn(1, 7, drafter.fc.in_features, dtype=torch.float64)
    block = BlockDrafter(drafter, 1, 5, GREEDY, RowRandom(1, seed=0))
    block.extend(taps[:, :3])
    block.extend(taps[:, 3:])
    drafted = block.draft(torch.tensor([9]), [0], [5])
    ids = torch.full((1, 1, 5), drafter.mask_token_id)
    ids[..., 0] = 9
    anchors = torch.tensor([[7]])
    slots = torch.arange(7, 12).view(1, 1, 5)
    blocks = BlockBatch(
        anchors=anchors,
        keep=torch.ones(1, 1, dtype=torch.bool),
        input_ids=ids,
        prev_ids=drafted.prev_ids.view(1, 1, 5),
        label_ids=ids,
        supervised=torch.ones(1, 1, 5, dtype=torch.bool),
        weights=torch.ones(1, 1, 5),
        target_positions=slots,
        position_ids=slots,
        context_start=torch.zeros(1, 1, dtype=torch.long),
    )
    padded = torch.cat([taps, torch.randn(1, 5, taps.shape[-1], dtype=torch.float64)], dim=1)
    hidden, _ = drafter.encode(drafter.context(padded), blocks, None)
    torch.testing.assert_close(hidden[0], drafted.hidden, atol=1e-12, rtol=1e-10)


@torch.no_grad()
def test_fewer_tokens_mean_a_shorter_block():
    model = add_drafter(tiny_target())
    seen = []
    decode = type(model.drafter).decode
    model.drafter.decode = lambda cache, ids: seen.append(ids.shape[1]) or decode(model.drafter, cache, ids)
    for count in (1, 3, 5):
        assert drafting(model, count=count).draft(torch.tensor([5, 6]), [0, 1], [count] * 2).tokens.shape == (2, count)
    domino = add_drafter(tiny_target(), "gru")
    domino.drafter.decode = lambda cache, ids: seen.append(ids.shape[1]) or decode(domino.drafter, cache, ids)
    drafting(domino).draft(torch.tensor([5, 6]), [0, 1], [4, 4])
    drafting(domino, count=2).draft(torch.tensor([5, 6]), [0, 1], [2, 2])
    assert seen == [1, 3, 5, 5, 3]


@pytest.mark.parametrize("count", [0, 6, -1])
def test_more_than_the_block_is_an_error(count: int):
    with pytest.raises(ConfigError, match=f"num_draft_tokens is {count}"):
        check_num_draft_tokens(add_drafter(tiny_target()).drafter, count)


@torch.no_grad()
def test_rows_do_not_see_each_other():
    model = add_drafter(tiny_target(dtype=torch.float64), "rnn")
    both = drafting(model, sampling=Sampling(1.0)).draft(torch.tensor([11, 12]), [0, 1], [5, 5])
    one = drafting(model, sampling=Sampling(1.0))
    one.select(torch.tensor([1]))
    alone = one.draft(torch.tensor([12]), [1], [5])
    assert torch.equal(alone.tokens[0], both.tokens[1])
    torch.testing.assert_close(alone.probabilities[0], both.probabilities[1])


@pytest.mark.parametrize("head", ["none", "vanilla", "rnn"])
@torch.no_grad()
def test_sampled_tokens_come_from_the_distribution_that_is_reported(head: str):
    model = add_drafter(tiny_target(), head)
    sampling = Sampling(0.9, 7, 0.95)
    block = drafting(model, sampling=sampling)
    drafted = block.draft(torch.tensor([11, 12]), [0, 1], [5, 5])
    assert (drafted.probabilities.gather(-1, drafted.tokens.unsqueeze(-1)) > 0).all()
    assert ((drafted.probabilities > 0).sum(-1) <= 7).all()
    torch.testing.assert_close(block.full_distribution(drafted, sampling), drafted.probabilities)


@torch.no_grad()
def test_reduced_vocabulary_drafts_ids_of_the_target():
    model = add_drafter(tiny_target(), "vanilla", draft_vocab_size=20)
    drafter = model.drafter
    kept = torch.arange(20) * 3
    drafter.d2t.copy_(kept - torch.arange(20))
    torch.nn.init.normal_(drafter.lm_head.weight)
    block = drafting(model)
    tokens = block.draft(torch.tensor([11, 12]), [0, 1], [5, 5]).tokens
    assert set(tokens.flatten().tolist()) <= set(kept.tolist())
    sampled = drafting(model, sampling=Sampling(1.0)).draft(torch.tensor([11, 12]), [0, 1], [5, 5])
    assert sampled.probabilities.shape == (2, 5, 61)
    assert set(sampled.tokens.flatten().tolist()) <= set(kept.tolist())
    outside = torch.ones(61, dtype=torch.bool)
    outside[kept] = False
    assert not sampled.probabilities[..., outside].any()
    first = probabilities(
        drafter.logits(sampled.hidden[:, 0], drafter.head.prev_embedding(sampled.prev_ids[:, 0])), Sampling(1.0)
    )
    torch.testing.assert_close(sampled.probabilities[:, 0, kept], first)
    ids = torch.tensor([[5, 6, 7]])
    truth = model.generate(ids, max_new_tokens=9, do_sample=False)
    assert torch.equal(generate(model, ids, max_new_tokens=9).sequences, truth)
