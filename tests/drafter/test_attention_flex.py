"""The flex attention path against the dense reference on a CPU, and its tile lists against the exact mask."""

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention import flex_attention

from modelopt_spec.drafter.attention import block_attention
from modelopt_spec.drafter.attention_flex import TILE, block_mask, flex_block_attention
from modelopt_spec.drafter.attention_reference import block_attention_reference, visible_keys
from tests.drafter.attention_cases import Case, cases

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def eager(monkeypatch):
    """Run the operator itself: no compilation, and gradients although the public function refuses them on a CPU."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


CASES = [
    Case(seed=1, batch=2, blocks=7, slots=4, length=60, dtype=torch.float32),
    Case(seed=2, batch=2, blocks=7, slots=5, length=60, padding=0.3, causal=True, ordered=False, dtype=torch.float32),
    Case(seed=3, blocks=40, slots=4, length=200, window=9, window_rule="query", with_sinks=True, dtype=torch.float32),
    Case(seed=4, blocks=5, slots=3, length=50, window=9, with_start=True, with_sinks=True, dtype=torch.float32),
    Case(
        seed=5, blocks=3, slots=8, length=30, window=2, window_rule="query", causal=True, repeat=1, dtype=torch.float32
    ),
    Case(seed=6, blocks=4, slots=2, length=10, padding=1.0, with_sinks=True, dtype=torch.float32),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case.seed}")
def test_outputs_equal_the_reference(case: Case, eager):
    torch.testing.assert_close(
        case.run(block_attention, implementation="flex"), case.run(block_attention_reference), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case.seed}")
def test_gradients_equal_the_reference(case: Case, eager):
    want = case.gradients(block_attention_reference)
    for name, x in case.gradients(flex_block_attention).items():
        torch.testing.assert_close(x, want[name], rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_tile_lists_hold_the_mask(case: Case):
    """Every visible cell lies in a listed tile, full tiles are visible throughout, no listed tile is empty."""
    # tiles as large as the real ones would hold the whole of a small case
    check_tiles(case.like(blocks=60 if case.batch == 1 else 33, length=case.length * 4))


def check_tiles(case: Case) -> None:
    plan, mask = case.plan, block_mask(case.plan)
    queries = case.blocks * case.slots
    keys = case.length + queries
    seen = plan.sort(visible_keys(plan))
    # columns of the own blocks in ascending order too; padding blocks see their own slots here
    own = torch.eye(case.blocks, dtype=torch.bool)[:, None, :, None]
    visible = plan.slots_visible()
    own = own & (True if visible is None else visible[:, None, :])
    own = own.expand(case.batch, case.blocks, case.slots, case.blocks, case.slots).flatten(3)
    exact = torch.cat([seen[..., : case.length], own], -1).flatten(1, 2)

    index = torch.arange(queries)[:, None], torch.arange(keys)
    for row in range(case.batch):
        assert torch.equal(mask.mask_mod(torch.tensor(row), torch.tensor(0), *index), exact[row])
        partial = listed(mask.kv_num_blocks, mask.kv_indices, row)
        full = listed(mask.full_kv_num_blocks, mask.full_kv_indices, row)
        assert not (partial & full).any()
        for i in range(partial.shape[0]):
            for j in range(partial.shape[1]):
                tile = exact[row, i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
                if full[i, j]:
                    assert tile.all()
                elif not partial[i, j]:
                    assert not tile.any()


def listed(counts: torch.Tensor, indices: torch.Tensor, row: int) -> torch.Tensor:
    chosen = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for i, count in enumerate(counts[row, 0].tolist()):
        chosen[i, indices[row, 0, i, :count].long()] = True
    return chosen


def test_sorted_anchors_leave_most_tiles_out():
    """16 query tiles x 24 key tiles: a staircase, a diagonal, and whole tiles below it."""
    case = Case(seed=7, blocks=256, slots=8, length=1024, dim=2)
    mask = block_mask(case.plan)
    partial, full = int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())
    assert full >= 40
    assert partial <= 60
    assert 70 <= partial + full < 16 * 24 / 3


def test_the_block_mask_is_made_once_for_all_layers():
    plan = Case().plan
    assert block_mask(plan) is block_mask(plan)
