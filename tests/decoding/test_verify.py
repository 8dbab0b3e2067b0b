"""The vectorised rules against the ones written out for one row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.verify import verify_greedy, verify_sampled
from modelopt_spec.decoding.verify_reference import verify_row_greedy, verify_row_sampled


def committed(verdict, draft_tokens) -> list[list[int]]:
    table = verdict.committed(draft_tokens).tolist()
    return [row[: n + 1] for row, n in zip(table, verdict.accepted.tolist(), strict=True)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(0, 5), rows=st.integers(1, 4), ragged=st.booleans())
def test_greedy_equals_the_reference(seed: int, slots: int, rows: int, ragged: bool):
    torch.manual_seed(seed)
    logits = torch.randn(rows, slots + 1, 4)
    drafts = torch.where(torch.rand(rows, slots) < 0.7, logits[:, :slots].argmax(-1), torch.randint(4, (rows, slots)))
    lengths = torch.randint(slots + 1, (rows,)) if ragged else torch.full((rows,), slots)
    got = committed(verify_greedy(logits, drafts, lengths.tolist()), drafts)
    for row, length in enumerate(lengths.tolist()):
        assert got[row] == verify_row_greedy(logits[row, : length + 1], drafts[row, :length].tolist())


class Scripted(RowRandom):
    """Acceptance by given uniform numbers; the next token by one more of them."""

    def __init__(self, uniforms: torch.Tensor, last: torch.Tensor) -> None:
        self.uniforms, self.last = uniforms, last

    def accept(self, probability, rows, counts):
        return self.uniforms < probability

    def uniform(self, rows, counts, width):
        return self.last.unsqueeze(1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(0, 5), rows=st.integers(1, 4), ragged=st.booleans())
def test_sampled_equals_the_reference(seed: int, slots: int, rows: int, ragged: bool):
    torch.manual_seed(seed)
    p = (torch.randn(rows, slots + 1, 5, dtype=torch.float64) * 2).softmax(-1)
    q = (torch.randn(rows, slots, 5, dtype=torch.float64) * 2).softmax(-1)
    q = torch.where(torch.rand(rows, slots, 1) < 0.3, p[:, :slots], q)
    drafts = torch.stack([torch.multinomial(row, 1).squeeze(1) for row in q]) if slots else torch.zeros(rows, 0).long()
    lengths = torch.randint(slots + 1, (rows,)) if ragged else torch.full((rows,), slots)
    uniforms = torch.rand(rows, slots, dtype=torch.float64)
    last = torch.rand(rows, dtype=torch.float64)
    verdict = verify_sampled(p, q, drafts, Scripted(uniforms, last), range(rows), lengths.tolist())
    got = committed(verdict, drafts)
    for row, length in enumerate(lengths.tolist()):

        def draw(weights, row=row):
            return int(torch.searchsorted(weights.cumsum(0), last[row] * weights.sum(), right=True))

        want = verify_row_sampled(
            p[row, : length + 1], q[row, :length], drafts[row, :length].tolist(), uniforms[row].tolist(), draw
        )
        assert got[row] == want


@pytest.mark.parametrize("disjoint", [True, False])
def test_one_slot_reproduces_the_target_exactly(disjoint: bool):
    """Sum over drafts and acceptances of probability times next-token distribution is p, to the last bit or two."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    q = torch.tensor([0.0, 0.0, 0.0, 1.0] if disjoint else [0.2, 0.5, 0.1, 0.2], dtype=torch.float64)
    total = torch.zeros(4, dtype=torch.float64)
    for token in range(4):
        if q[token] == 0:
            continue
        accept = torch.clamp(p[token] / q[token], max=1)
        total[token] += q[token] * accept
        residual = (p - q).clamp(min=0)
        total += q[token] * (1 - accept) * residual / residual.sum()
    torch.testing.assert_close(total, p, atol=1e-15, rtol=0)

    class Reject(RowRandom):
        def __init__(self):
            pass

        def accept(self, probability, rows, counts):
            return torch.zeros(probability.shape, dtype=torch.bool)

        def categorical(self, probabilities, rows, active=None):
            self.seen = probabilities / probabilities.sum(-1, keepdim=True)
            return torch.zeros(len(rows), dtype=torch.long)

    random = Reject()
    verify_sampled(p.expand(1, 2, 4), q.view(1, 1, 4), torch.tensor([[3]]), random, [0], [1])
    torch.testing.assert_close(random.seen[0], (p - q).clamp(min=0) / (p - q).clamp(min=0).sum())


def test_equal_distributions_always_accept():
    torch.manual_seed(0)
    q = torch.randn(50, 4, 7, dtype=torch.float64).softmax(-1)
    p = torch.cat([q, q[:, :1]], dim=1)
    drafts = torch.stack([torch.multinomial(row, 1).squeeze(1) for row in q])
    verdict = verify_sampled(p, q, drafts, RowRandom(50, seed=0), range(50), [4] * 50)
    assert verdict.accepted.tolist() == [4] * 50
