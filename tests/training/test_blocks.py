"""Anchors and blocks against plain loops over rows, anchors and slots."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_spec.conventions import BlockLayout
from modelopt_spec.training.blocks import (
    BlockSettings,
    anchor_generator,
    make_blocks,
    row_generators,
    sample_anchors,
    valid_anchors,
)

MASK_ID = 99


def random_rows(seed: int, batch: int, length: int, share: float, packed: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 90, (batch, length), generator=generator)
    mask = torch.rand(batch, length, generator=generator) < share
    segments = None
    if packed:
        starts = torch.rand(batch, length, generator=generator) < 0.2
        starts[:, 0] = False
        segments = starts.long().cumsum(1)
    return ids, mask, segments


def restarted(segments: torch.Tensor) -> torch.Tensor:
    """Positions that start at 0 with every segment, by a loop."""
    positions = torch.zeros_like(segments)
    for b in range(segments.shape[0]):
        for s in range(1, segments.shape[1]):
            positions[b, s] = positions[b, s - 1] + 1 if segments[b, s] == segments[b, s - 1] else 0
    return positions


def expected_block(ids, mask, segments, anchor: int, layout: BlockLayout, size: int, decay, stop_at_gap: bool) -> dict:
    """One block of one row, slot by slot, from the conventions' sentences."""
    length = len(ids)
    block: dict[str, list] = {"input": [], "prev": [], "label": [], "taught": [], "weight": [], "read": []}
    first = 0 if layout == BlockLayout.ANCHOR_FIRST else 1
    going = True
    for k in range(size):
        label = anchor + k + (1 if layout == BlockLayout.ANCHOR_FIRST else 0)
        block["input"].append(int(ids[anchor]) if k == 0 else MASK_ID)
        taught = k >= first and label < length and bool(mask[label])
        if taught and segments is not None:
            taught = int(segments[label]) == int(segments[anchor])
        if k >= first:
            going = going and taught
            taught = going if stop_at_gap else taught
        block["taught"].append(taught)
        rank = max(0, k - first)
        block["weight"].append((math.exp(-rank / decay) if decay else 1.0) if taught else 0.0)
        block["label"].append(int(ids[min(label, length - 1)]))
        block["prev"].append(int(ids[min(max(label - 1, anchor), length - 1)]))
        block["read"].append(min(max(label - 1, 0), length - 1))
    return block


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 3),
    length=st.integers(2, 24),
    share=st.floats(0, 1),
    packed=st.booleans(),
    size=st.integers(2, 6),
    layout=st.sampled_from(list(BlockLayout)),
    decay=st.one_of(st.none(), st.floats(0.5, 8)),
    stop_at_gap=st.booleans(),
    num_anchors=st.integers(1, 12),
    by_row=st.booleans(),
)
def test_blocks_are_what_plain_loops_give(
    seed, batch, length, share, packed, size, layout, decay, stop_at_gap, num_anchors, by_row
) -> None:
    ids, mask, segments = random_rows(seed, batch, length, share, packed)
    valid = valid_anchors(mask, segments)
    generator = row_generators(seed, 0, range(batch)) if by_row else anchor_generator(seed, 0)
    anchors, keep = sample_anchors(valid, num_anchors, generator)
    positions = restarted(segments) if segments is not None else None
    block_settings = BlockSettings(size, layout, MASK_ID, num_anchors, decay, stop_at_gap)
    blocks = make_blocks(ids, mask, anchors, keep, block_settings, position_ids=positions, segment_ids=segments)
    for b in range(batch):
        possible = [
            s
            for s in range(length - 1)
            if mask[b, s] and mask[b, s + 1] and (segments is None or segments[b, s] == segments[b, s + 1])
        ]
        chosen = anchors[b, keep[b]].tolist()
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(possible)
        assert len(chosen) == min(num_anchors, len(possible))
        assert keep[b].tolist() == sorted(keep[b].tolist(), reverse=True), "padding blocks stand last"
        for n in range(anchors.shape[1]):
            if not keep[b, n]:
                assert anchors[b, n] == 0
                assert not blocks.supervised[b, n].any()
                assert blocks.weights[b, n].sum() == 0
                continue
            row_segments = None if segments is None else segments[b]
            expected = expected_block(
                ids[b], mask[b], row_segments, int(anchors[b, n]), layout, size, decay, stop_at_gap
            )
            assert blocks.input_ids[b, n].tolist() == expected["input"]
            assert blocks.supervised[b, n].tolist() == expected["taught"]
            torch.testing.assert_close(blocks.weights[b, n], torch.tensor(expected["weight"], dtype=torch.float64))
            assert blocks.target_positions[b, n].tolist() == expected["read"]
            for k in range(size):
                if expected["taught"][k]:
                    assert blocks.label_ids[b, n, k] == expected["label"][k]
                    assert blocks.prev_ids[b, n, k] == expected["prev"][k]
            anchor = int(anchors[b, n])
            start = 0
            if segments is not None:
                start = min(s for s in range(length) if segments[b, s] == segments[b, anchor])
            assert int(blocks.context_start[b, n]) == start
            assert blocks.position_ids[b, n].tolist() == [anchor - start + k for k in range(size)]


def test_an_anchor_first_block_of_a_supervised_row_teaches_its_first_slot() -> None:
    ids, mask, _ = random_rows(0, 2, 20, 0.7, packed=False)
    anchors, keep = sample_anchors(valid_anchors(mask), 100, None)
    chosen = BlockSettings(4, BlockLayout.ANCHOR_FIRST, MASK_ID, 100, None, stop_at_gap=True)
    blocks = make_blocks(ids, mask, anchors, keep, chosen)
    assert torch.equal(blocks.supervised[..., 0], keep)


def test_a_row_draws_the_same_anchors_in_any_batch() -> None:
    _, mask, _ = random_rows(5, 4, 40, 0.8, packed=False)
    mask[2, 20:] = False
    valid = valid_anchors(mask)
    together, keep = sample_anchors(valid, 6, row_generators(1, 17, [10, 11, 12, 13]))
    alone, alone_keep = sample_anchors(valid[2:3, :20], 6, row_generators(1, 17, [12]))
    assert together[2, keep[2]].tolist() == alone[0, alone_keep[0]].tolist()
    reordered, other = sample_anchors(valid[[3, 0]], 6, row_generators(1, 17, [13, 10]))
    assert reordered[0, other[0]].tolist() == together[3, keep[3]].tolist()


@pytest.mark.parametrize(("seed", "step", "row"), [(2, 17, 12), (1, 18, 12), (1, 17, 13), (1, "eval", 12)])
def test_seed_step_and_row_all_change_the_draw(seed, step, row) -> None:
    base = torch.rand(8, generator=row_generators(1, 17, [12])[0])
    assert not torch.equal(base, torch.rand(8, generator=row_generators(seed, step, [row])[0]))


def test_every_valid_position_is_drawn_equally_often() -> None:
    valid = torch.ones(1, 10, dtype=torch.bool)
    counts = torch.zeros(10)
    draws = 2000
    for step in range(draws):
        anchors, _ = sample_anchors(valid, 3, row_generators(0, step, [0]))
        counts[anchors[0]] += 1
    expected = draws * 3 / 10
    deviation = math.sqrt(draws * 0.3 * 0.7)
    assert (counts - expected).abs().max() < 4 * deviation


def test_rows_without_valid_positions_give_padding_blocks_only() -> None:
    valid = torch.zeros(2, 9, dtype=torch.bool)
    anchors, keep = sample_anchors(valid, 5, row_generators(0, 0, [0, 1]))
    assert anchors.shape == (2, 1)
    assert not keep.any()
