"""The order of rows: a permutation of each epoch, the same everywhere, balanced by length where asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_spec.training.sampling import EpochSampler


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(0, 300),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 5),
    group=st.integers(1, 16),
    by_length=st.booleans(),
)
def test_every_epoch_is_a_permutation_that_seed_and_epoch_decide(rows, seed, epoch, group, by_length) -> None:
    lengths = torch.randint(1, 500, (rows,), generator=torch.Generator().manual_seed(seed)) if by_length else None
    sampler = EpochSampler(rows, seed, lengths=lengths, group=group)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert sorted(order) == list(range(rows))
    assert len(sampler) == rows
    again = EpochSampler(rows, seed, lengths=lengths, group=group)
    again.set_epoch(epoch)
    assert list(again) == order


def test_epochs_and_seeds_differ() -> None:
    sampler = EpochSampler(50, 1)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(EpochSampler(50, 2)) != first


def padding(order: torch.Tensor, lengths: torch.Tensor, batch: int) -> float:
    """Share of padding in batches of consecutive rows."""
    parts = [lengths[part] for part in order.split(batch)]
    full = sum(int(part.max()) * len(part) for part in parts)
    return 1 - float(lengths.sum()) / full


def imbalance(order: torch.Tensor, lengths: torch.Tensor, batch: int, ranks: int) -> float:
    """Longest rank's padded tokens over the mean of all ranks, averaged over the rounds of batches."""
    rounds = order[: len(order) // (batch * ranks) * batch * ranks].view(-1, ranks, batch)
    work = lengths[rounds].max(-1).values.float()
    return float((work.max(1).values / work.mean(1)).mean())


def test_length_groups_need_little_padding_and_keep_ranks_busy_alike() -> None:
    lengths = (torch.rand(4000, generator=torch.Generator().manual_seed(0)) ** 3 * 2000).long() + 20
    batch, ranks, accumulation = 4, 8, 2
    grouped = EpochSampler(4000, 0, lengths=lengths, group=batch * ranks * accumulation).order()
    shuffled = EpochSampler(4000, 0).order()
    assert padding(grouped, lengths, batch) < 0.05 < 0.3 < padding(shuffled, lengths, batch)
    assert imbalance(grouped, lengths, batch, ranks) < 1.1 < 1.5 < imbalance(shuffled, lengths, batch, ranks)


def test_the_longest_row_comes_in_the_first_step_and_long_steps_are_spread() -> None:
    lengths = torch.arange(1, 1001)
    order = EpochSampler(1000, 3, lengths=lengths, group=10).order()
    assert 999 in order[:10].tolist()
    means = lengths[order[10:1000].view(-1, 10)].float().mean(1)
    first, second = means[: len(means) // 2].mean(), means[len(means) // 2 :].mean()
    assert abs(float(first - second)) < 150, "long and short steps are mixed over the epoch"


@pytest.mark.parametrize("group", [7, 1000])
def test_a_last_incomplete_step_stays_last(group: int) -> None:
    lengths = torch.randint(1, 99, (100,), generator=torch.Generator().manual_seed(1))
    order = EpochSampler(100, 0, lengths=lengths, group=group).order()
    assert sorted(order.tolist()) == list(range(100))
