"""Attention while generating: one block per row that continues contexts of different lengths."""

import pytest
import torch

from modelopt_spec.drafter.attention import decode_attention, plan_decode
from modelopt_spec.drafter.attention_reference import block_attention_reference
from modelopt_spec.errors import SpecError

BATCH, SLOTS, HEADS, KV_HEADS, DIM, CACHE = 3, 4, 4, 2, 8, 20
LENGTHS = torch.tensor([20, 7, 0])
OPTIONS = [
    {},
    {"causal": True},
    {"window": 6},
    {"window": 6, "window_rule": "query"},
    {"window": 2, "window_rule": "query", "causal": True},
]


def tensors(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(BATCH, SLOTS, HEADS), *[(BATCH, CACHE, KV_HEADS)] * 2, *[(BATCH, SLOTS, KV_HEADS)] * 2]
    return [torch.randn(*shape, DIM, generator=generator) for shape in shapes]


def alone(row: int, xs: list[torch.Tensor], sinks: torch.Tensor | None, **options) -> torch.Tensor:
    """The same row without a batch and without padding, by the reference."""
    length = int(LENGTHS[row])
    q, k, v, kb, vb = (x[row : row + 1] for x in xs)
    plan = plan_decode(torch.tensor([length]), block_size=SLOTS, context_len=length, **options)
    blocks = (q.unsqueeze(1), k[:, :length], v[:, :length], kb.unsqueeze(1), vb.unsqueeze(1))
    return block_attention_reference(*blocks, plan, scale=0.3, sinks=sinks)[0, 0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_of_a_mixed_batch_equal_the_rows_alone(options: dict, with_sinks: bool, side: str):
    xs = tensors()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    want = torch.stack([alone(row, xs, sinks, **options) for row in range(BATCH)])
    start, end = None, LENGTHS
    if side == "left":
        start, end = CACHE - LENGTHS, torch.full_like(LENGTHS, CACHE)
        for i in (1, 2):
            xs[i] = torch.stack([x.roll(CACHE - n, 0) for x, n in zip(xs[i], LENGTHS.tolist(), strict=True)])
    for row, (low, high) in enumerate(zip(CACHE - LENGTHS if side == "left" else [0] * BATCH, end, strict=True)):
        for i in (1, 2):  # what is not valid must not matter
            xs[i][row, : int(low)] = 1e3
            xs[i][row, int(high) :] = 1e3
    plan = plan_decode(end, start, block_size=SLOTS, context_len=CACHE, **options)
    got = decode_attention(*xs, plan, scale=0.3, sinks=sinks)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_rows_that_draft_nothing_are_zero():
    plan = plan_decode(LENGTHS, keep=torch.tensor([True, False, True]), block_size=SLOTS, context_len=CACHE)
    out = decode_attention(*tensors(), plan, scale=0.3)
    assert (out[1] == 0).all()
    assert (out[0] != 0).all()


def test_it_takes_decoding_shapes_only():
    plan = plan_decode(LENGTHS, block_size=SLOTS, context_len=CACHE)
    q, *rest = tensors()
    with pytest.raises(SpecError, match="decoding takes q"):
        decode_attention(q.unsqueeze(1), *rest, plan, scale=0.3)
    with pytest.raises(SpecError, match="k_ctx is"):
        decode_attention(q, rest[0][:, :-1], *rest[1:], plan, scale=0.3)
    with pytest.raises(SpecError, match="context_end"):
        plan_decode(LENGTHS.unsqueeze(1), block_size=SLOTS, context_len=CACHE)
