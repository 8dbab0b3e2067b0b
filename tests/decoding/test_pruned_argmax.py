"""The search that skips most of W_out finds what the whole product finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelopt_spec.decoding.draft import BlockDrafter
from modelopt_spec.decoding.pruned_argmax import PrunedArgmax
from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.sampling import GREEDY
from tests.decoding.tiny import HEADS, add_drafter, tiny_target


def dense(base: torch.Tensor, weight: torch.Tensor, latents: torch.Tensor) -> list[int]:
    """The plain version: correct every logit, take the largest."""
    return (base + latents @ weight.T).argmax(-1).tolist()


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rank=st.integers(1, 9),
    chunks=st.integers(1, 60),
    spread=st.sampled_from([0.0, 0.05, 1.0, 20.0]),
    peaked=st.booleans(),
)
def test_equals_the_dense_product(seed: int, rank: int, chunks: int, spread: float, peaked: bool):
    torch.manual_seed(seed)
    vocab = chunks * PrunedArgmax.CHUNK
    weight, latents = torch.randn(vocab, rank, dtype=torch.float64) * spread, torch.randn(4, rank, dtype=torch.float64)
    base = torch.randn(4, vocab).double() * (8 if peaked else 0.5)
    search = PrunedArgmax(weight)
    search.start(base)
    assert [int(search.best(k, latents[k])) for k in range(4)] == dense(base, weight, latents)


def test_a_correction_can_lift_an_unlikely_token():
    weight = torch.zeros(128 * 64, 3)
    weight[77, 1] = 50.0
    base = torch.zeros(1, len(weight))
    base[0, 4000] = 10.0
    search = PrunedArgmax(weight)
    search.start(base)
    assert int(search.best(0, torch.tensor([0.0, 1.0, 0.0]))) == 77
    assert int(search.best(0, torch.tensor([0.0, -1.0, 0.0]))) == 4000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_all_rows_share_does_not_widen_the_bounds(dtype: torch.dtype):
    """A trained W_out: one large common row, small differences; the search must still skip nearly all of it."""
    torch.manual_seed(0)
    vocab, rank = 256 * PrunedArgmax.CHUNK, 16
    weight = (2.0 * torch.randn(rank) + 0.1 * torch.randn(vocab, rank)).to(dtype)
    base, latents = 3 * torch.randn(8, vocab), torch.randn(8, rank).to(dtype)
    search = PrunedArgmax(weight)
    search.start(base)
    found = [int(search.best(k, latents[k])) for k in range(8)]
    assert found == (base + nn.functional.linear(latents, weight)).argmax(-1).tolist()
    assert max(len(search.candidates(k, latents[k])) for k in range(8)) < vocab // 50


def test_when_it_is_used():
    large = nn.Linear(64, 2**13, bias=False)
    assert PrunedArgmax.pays(large, 1)
    assert not PrunedArgmax.pays(large, 2)
    assert not PrunedArgmax.pays(nn.Linear(64, 2**13), 1)
    assert not PrunedArgmax.pays(nn.Linear(64, 2**13 + 1, bias=False), 1)
    assert not PrunedArgmax.pays(nn.Linear(4, 2**13, bias=False), 1)
    large.register_forward_hook(lambda module, args, output: output + 1)
    assert not PrunedArgmax.pays(large, 1)


@pytest.mark.parametrize("head", HEADS[1:])
def test_blocks_are_the_same_with_and_without(head: str, monkeypatch):
    model = add_drafter(tiny_target(vocab_size=2**11), head)
    drafter = model.drafter

    def block() -> list[list[int]]:
        drafting = BlockDrafter(drafter, 1, drafter.num_draft_tokens, GREEDY, RowRandom(1, seed=0))
        torch.manual_seed(0)
        drafted = []
        for anchor in (5, 900, 2000):
            drafting.extend(torch.randn(1, 3, drafter.fc.in_features))
            drafted.append(drafting.draft(torch.tensor([anchor]), [0], [drafter.num_draft_tokens]).tokens[0].tolist())
        used.append(drafting._pruned is not None)
        return drafted

    used: list[bool] = []
    with torch.no_grad():
        plain = block()
        monkeypatch.setattr(PrunedArgmax, "pays", classmethod(lambda cls, out, batch_size: batch_size == 1))
        assert block() == plain
    assert used == [False, True]
